//! The file of the rules, read again on SIGHUP and when it changes.

use std::{
    os::unix::fs::MetadataExt,
    path::{Path, PathBuf},
    sync::Arc,
    time::{Duration, SystemTime},
};

use anyhow::{Context, Result};
use metrics::counter;
use tokio::{fs, signal::unix::Signal, sync::watch, time::interval};
use tower_sliding_window::Limiter;
use tracing::{info, warn};

use crate::{file::File, rules::Rules};

pub(crate) type Stamp = Option<(SystemTime, u64, u64)>;

/// Watches the file as long as it is polled.
pub(crate) async fn watch(
    path: PathBuf,
    mut seen: Stamp,
    started: File,
    limiter: Limiter,
    rules: watch::Sender<Arc<Rules>>,
    mut hangup: Signal,
) -> Result<()> {
    let mut before = seen;
    let mut ticks = interval(Duration::from_secs(1));
    loop {
        let is_asked = tokio::select! {
            _ = ticks.tick() => false,
            _ = hangup.recv() => true,
        };
        let now = stamp(&path);
        // A file that has changed since the last look may be half written.
        let is_written = now == before;
        before = now;
        if !is_asked && (now == seen || !is_written) {
            continue;
        }
        seen = now;
        let read = async {
            let text = fs::read_to_string(&path)
                .await
                .context("it cannot be read")?;
            let file = File::read(&text)?;
            anyhow::Ok((Rules::build(&text, &file, &limiter)?, file))
        };
        match read.await {
            Ok((new, file)) => {
                if !file.has_settings_of(&started) {
                    warn!("listen, grpc_listen, store and token hold from the next start on");
                }
                info!(rules = new.all.len(), "the rules were read again");
                counter!("rate_limit_service_reloads_total", "outcome" => "read").increment(1);
                rules.send_replace(Arc::new(new));
            }
            Err(problem) => {
                warn!(
                    "the rules stay as they are, since {} has a mistake: {problem:#}",
                    path.display()
                );
                counter!("rate_limit_service_reloads_total", "outcome" => "refused").increment(1);
            }
        }
    }
}

/// A value that changes when the file does.
pub(crate) fn stamp(path: &Path) -> Stamp {
    let known = std::fs::metadata(path).ok()?;
    Some((known.modified().ok()?, known.len(), known.ino()))
}
