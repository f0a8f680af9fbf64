//! Sends single commands: resets a key, and tries a new store out.

use std::{future::Future, sync::Arc};

use redis::cmd;
use tokio::task::JoinSet;

use super::{
    batch::Batch,
    dispatcher::{Dispatcher, of_ended_runtime},
};
use crate::{error::StoreError, key::Key, limit::Limit, store::redis::connect::errors::failure};

impl Dispatcher {
    /// Runs the script without a check, and deletes a key that no limit has. So the server is reached, knows the script,
    /// and lets this user run it and write at our keys.
    pub(crate) async fn try_out(self: &Arc<Self>) -> Result<(), StoreError> {
        let dispatcher = Arc::clone(self);
        self.in_task(async move {
            let batch = Batch::new(Vec::new(), dispatcher.config.clock.as_ref());
            dispatcher.try_send(&batch, false).await?.map_err(failure)?;
            dispatcher.unlink(&format!("{}:", dispatcher.keys().prefix())).await
        })
        .await
    }

    /// Forgets the counted units of a limit and a key.
    pub(crate) async fn reset(self: &Arc<Self>, limit: Limit, key: &Key) -> Result<(), StoreError> {
        let (dispatcher, key) = (Arc::clone(self), self.keys().of(&limit, key));
        let outdated = self.config.local_state.outdate(vec![limit], None);
        let result = self.in_task(async move { dispatcher.unlink(&key).await }).await;
        drop(outdated);
        result
    }

    /// Runs a future that takes a connection in a task. The task ends if the caller stops waiting.
    async fn in_task(
        &self,
        future: impl Future<Output = Result<(), StoreError>> + Send + 'static,
    ) -> Result<(), StoreError> {
        let mut task = JoinSet::new();
        task.spawn_on(future, &self.runtime);
        while let Some(result) = task.join_next().await {
            result.unwrap_or_else(|error| Err(of_ended_runtime(error)))?;
        }
        Ok(())
    }

    /// Deletes a key. Deletes it again if the connection was broken, which does no harm.
    async fn unlink(&self, key: &str) -> Result<(), StoreError> {
        let mut command = cmd("UNLINK");
        command.arg(key);
        let send = async |again| {
            let (mut connection, _pooled) = self.pool.take().await?;
            Ok::<_, StoreError>(connection.send(&command, again).await)
        };
        let mut reply = send(false).await?;
        if reply.as_ref().is_err_and(|error| self.is_worth_another_try(error)) {
            reply = send(true).await?;
        }
        reply.map(drop).map_err(failure)
    }
}
