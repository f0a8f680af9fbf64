//! The log lines of one test.

use std::{
    io,
    sync::{Arc, LazyLock, Mutex},
    thread,
    time::Duration,
};

use tracing::{Dispatch, subscriber::NoSubscriber};
use tracing_subscriber::{filter::LevelFilter, util::SubscriberInitExt};

/// All log lines of this thread, down to trace, until it is dropped.
pub(crate) struct Log {
    lines: Lines,
    _subscriber: Box<dyn std::any::Any>,
}

impl Log {
    pub(crate) fn start() -> Self {
        /// Gets no line. But if there is only one subscriber, an event that another thread reaches
        /// first is turned off in all threads.
        static SECOND: LazyLock<Dispatch> = LazyLock::new(|| Dispatch::new(NoSubscriber::new()));

        LazyLock::force(&SECOND);
        let lines = Lines::default();
        let writer = lines.clone();
        let subscriber = tracing_subscriber::fmt()
            .with_ansi(false)
            .with_max_level(LevelFilter::TRACE);
        let subscriber = subscriber
            .with_writer(move || writer.clone())
            .finish()
            .set_default();
        // An event that another test reached for the first time just now may have missed this
        // subscriber, so this looks again.
        thread::sleep(Duration::from_millis(5));
        tracing::callsite::rebuild_interest_cache();
        Self {
            lines,
            _subscriber: Box::new(subscriber),
        }
    }

    pub(crate) fn text(&self) -> String {
        String::from_utf8(self.lines.0.lock().unwrap().clone()).unwrap()
    }
}

#[derive(Clone, Default)]
struct Lines(Arc<Mutex<Vec<u8>>>);

impl io::Write for Lines {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.0.lock().unwrap().write(bytes)
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}
