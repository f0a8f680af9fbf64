//! Places that this process gives back before it ends, and calls that must not be lost.

use std::{
    future::Future,
    sync::{Arc, Mutex, PoisonError, Weak},
    thread,
};

use tokio::{
    runtime::{Builder, Handle},
    sync::watch,
};

/// Of all limiters and layers on the clones of a store.
#[derive(Debug, Default)]
pub(crate) struct Owed {
    /// Its receivers are the calls that are on their way.
    underway: watch::Sender<()>,
    holders: Mutex<Vec<Weak<dyn Holder>>>,
}

/// A call is on its way as long as this is kept.
pub(crate) type Underway = watch::Receiver<()>;

/// Has taken something that is to be given back.
pub(crate) trait Holder: Send + Sync {
    /// Begins to give everything back. The calls are [underway](Owed::begin) from then on.
    fn give_back(&self);
}

impl Owed {
    /// A call begins whose end is waited for when the process ends.
    pub(crate) fn begin(&self) -> Underway {
        self.underway.subscribe()
    }

    /// From now on a holder may have something to give back. A holder may register again.
    pub(crate) fn register<H: Holder + 'static>(&self, holder: &Arc<H>) {
        let holder: Weak<dyn Holder> = Arc::downgrade(holder) as _;
        let mut holders = self.holders.lock().unwrap_or_else(PoisonError::into_inner);
        holders.retain(|other| other.strong_count() > 0 && !other.ptr_eq(&holder));
        holders.push(holder);
    }

    /// Lets all holders give back what they have.
    pub(crate) fn give_back(&self) {
        let holders = self.holders.lock().unwrap_or_else(PoisonError::into_inner).clone();
        holders.iter().filter_map(Weak::upgrade).for_each(|holder| holder.give_back());
    }

    /// Waits until nothing is on its way.
    pub(crate) async fn settled(&self) {
        self.underway.closed().await;
    }
}

/// Completes a future in a task of the current runtime, or without one on a thread.
pub(crate) fn complete(future: impl Future<Output = ()> + Send + 'static) {
    match Handle::try_current() {
        Ok(runtime) => drop(runtime.spawn(future)),
        Err(_) => on_thread(future),
    }
}

/// Completes a future on a thread of its own. It is dropped if there is none.
pub(crate) fn on_thread(future: impl Future<Output = ()> + Send + 'static) {
    if let Ok(runtime) = Builder::new_current_thread().enable_all().build() {
        _ = thread::Builder::new().spawn(move || runtime.block_on(future));
    }
}
