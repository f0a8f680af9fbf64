//! Places that this process gives back before it ends, and calls that must not be lost.
//!
//! A call whose caller has left goes on in a task of the current runtime. If there is no runtime,
//! or if the runtime ends, a thread goes on with the call. All such calls of a store share one
//! thread, which ends with the last of them.

use std::{
    future::Future,
    mem,
    pin::Pin,
    sync::{Arc, Mutex, Weak},
    task::{Context, Poll},
    thread,
    time::Duration,
};

use tokio::{
    runtime::{Builder, Handle},
    sync::watch,
    task::JoinSet,
    time::timeout,
};

use super::lock;

/// The name of the thread.
const THREAD: &str = "rate limits owed";

/// The longest time until the thread looks for further calls.
const PAUSE: Duration = Duration::from_millis(10);

/// The places that all limiters and layers on the clones of a store have to give back, and the
/// calls that they have to complete.
#[derive(Default)]
pub(crate) struct Owed {
    /// Each call that is on its way has a receiver of this channel.
    underway: watch::Sender<()>,
    holders: Mutex<Vec<Weak<dyn Holder>>>,
    /// The calls for the thread; `None` if no thread runs.
    on_thread: Mutex<Option<Vec<Call>>>,
}

type Call = Pin<Box<dyn Future<Output = ()> + Send>>;

/// A call counts as on its way as long as this value is kept.
pub(crate) type Underway = watch::Receiver<()>;

/// A value that has taken something, and has to give it back.
pub(crate) trait Holder: Send + Sync {
    /// Begins to give everything back, and returns whether there was anything to give back. The
    /// calls that give it back are [underway](Owed::begin) from then on.
    fn give_back(&self) -> bool;
}

impl Owed {
    /// Takes note that a call begins. `shutdown` waits for this call until the returned value is
    /// dropped.
    pub(crate) fn begin(&self) -> Underway {
        self.underway.subscribe()
    }

    /// Takes note that a holder may have something to give back from now on. A holder may register
    /// again.
    pub(crate) fn register<H: Holder + 'static>(&self, holder: &Arc<H>) {
        let holder: Weak<dyn Holder> = Arc::downgrade(holder) as _;
        let mut holders = lock(&self.holders);
        holders.retain(|other| other.strong_count() > 0 && !other.ptr_eq(&holder));
        holders.push(holder);
    }

    /// Lets all holders give everything back, and returns whether there was anything to give back.
    pub(crate) fn give_back(&self) -> bool {
        let holders = lock(&self.holders).clone();
        holders
            .iter()
            .filter_map(Weak::upgrade)
            .fold(false, |any, holder| any | holder.give_back())
    }

    /// Waits until no call is on its way.
    pub(crate) async fn settled(&self) {
        self.underway.closed().await;
    }

    /// Makes a future that goes on if it is dropped before its end. The future must not depend on
    /// timers of its runtime.
    pub(crate) fn detachable<T>(
        self: &Arc<Self>,
        future: impl Future<Output = T> + Send + 'static,
    ) -> Detachable<T>
    where
        T: Send,
    {
        Detachable {
            owed: Arc::clone(self),
            underway: self.begin(),
            future: Some(Box::pin(future)),
            is_in_task: false,
        }
    }

    /// Completes a call on the thread. The call is dropped if no thread can be started.
    pub(crate) fn on_thread(self: &Arc<Self>, call: impl Future<Output = ()> + Send + 'static) {
        let mut on_thread = lock(&self.on_thread);
        if let Some(calls) = &mut *on_thread {
            return calls.push(Box::pin(call));
        }
        *on_thread = Some(vec![Box::pin(call)]);
        drop(on_thread);
        let owed = Arc::clone(self);
        let run = move || match Builder::new_current_thread().enable_all().build() {
            Ok(runtime) => runtime.block_on(owed.complete_all()),
            Err(_) => owed.drop_calls(),
        };
        if thread::Builder::new()
            .name(THREAD.to_owned())
            .spawn(run)
            .is_err()
        {
            self.drop_calls();
        }
    }

    /// Whether the current runtime is the runtime of the thread.
    #[cfg(feature = "redis")]
    pub(crate) fn is_in_brief_runtime() -> bool {
        thread::current().name() == Some(THREAD)
    }

    async fn complete_all(&self) {
        let mut running = JoinSet::new();
        while let Some(calls) = self.next_calls(running.is_empty()) {
            calls.into_iter().for_each(|call| drop(running.spawn(call)));
            let _ = timeout(PAUSE, running.join_next()).await;
        }
    }

    /// Takes the calls that wait for the thread. Returns `None`, which ends the thread, if no call
    /// waits and none is running.
    fn next_calls(&self, is_idle: bool) -> Option<Vec<Call>> {
        let mut on_thread = lock(&self.on_thread);
        let calls = mem::take(on_thread.as_mut()?);
        if calls.is_empty() && is_idle {
            *on_thread = None;
            return None;
        }
        Some(calls)
    }

    fn drop_calls(&self) {
        let calls = lock(&self.on_thread).take();
        drop(calls);
    }
}

/// A future that goes on if it is dropped before its end. The future goes on in a task of the
/// current runtime, or on the thread if there is no runtime, or if the runtime ends. The future
/// needs a deadline of its own, since no caller waits for it after the drop.
pub(crate) struct Detachable<T: Send + 'static> {
    owed: Arc<Owed>,
    underway: Underway,
    future: Option<Pin<Box<dyn Future<Output = T> + Send>>>,
    is_in_task: bool,
}

impl<T: Send + 'static> Future for Detachable<T> {
    type Output = T;

    fn poll(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<T> {
        // The future is put back only while pending, so that a future that panics is not polled
        // again.
        let Some(mut future) = self.future.take() else {
            return Poll::Pending;
        };
        let polled = future.as_mut().poll(cx);
        if polled.is_pending() {
            self.future = Some(future);
        }
        polled
    }
}

impl<T: Send + 'static> Drop for Detachable<T> {
    fn drop(&mut self) {
        let Some(future) = self.future.take() else {
            return;
        };
        let owed = Arc::clone(&self.owed);
        let underway = self.underway.clone();
        match Handle::try_current() {
            Ok(runtime) if !self.is_in_task => {
                runtime.spawn(Self {
                    owed,
                    underway,
                    future: Some(future),
                    is_in_task: true,
                });
            }
            _ => owed.on_thread(async move {
                drop(future.await);
                drop(underway);
            }),
        }
    }
}
