//! Work that must finish before shutdown: places to give back, and calls that must not be lost.
//!
//! If a call's caller has left, the call goes on in a task on the current runtime. If there is no
//! current runtime, or it ends, a separate thread goes on with the call. All such calls for a store
//! share one thread, which ends with the last of them.

use std::{
    cell::Cell,
    future::Future,
    pin::Pin,
    sync::{Arc, Mutex, Weak, atomic::AtomicBool},
    task::{Context, Poll},
    thread,
};

use tokio::{
    runtime::{Builder, Handle},
    spawn,
    sync::{
        RwLock,
        mpsc::{UnboundedSender, WeakUnboundedSender, unbounded_channel},
        watch,
    },
};

use super::lock;
use crate::{
    check::Check,
    key::{ByDigest, Digester, make_room},
};

/// The thread's name.
const THREAD: &str = "rate limits owed";

thread_local! {
    /// True on the thread.
    static IS_BRIEF: Cell<bool> = const { Cell::new(false) };
}

/// The places that all limiters and layers on a store's clones have to give back, and the calls
/// that they have to complete.
#[derive(Default)]
pub(crate) struct Owed {
    /// Each call in flight keeps a receiver for this channel.
    underway: watch::Sender<()>,
    holders: Mutex<Vec<Weak<dyn Holder>>>,
    /// Sends calls to the thread. Each call on the thread keeps a sender, so the thread ends with
    /// the last call. `None` until there is a thread.
    thread: Mutex<Option<WeakUnboundedSender<Call>>>,
    digester: Digester,
    /// The places taken with callers' ids, by a digest of the check and the id.
    shared: Mutex<ByDigest<Weak<SharedPlaces>>>,
}

/// Places taken with a caller's id. The tries and the decisions that use these places hold a read
/// lock, and a call that frees them holds the write lock. The value is `true` if the last user has
/// to free the places.
pub(crate) type SharedPlaces = RwLock<AtomicBool>;

type Call = Pin<Box<dyn Future<Output = ()> + Send>>;

/// A call counts as in flight as long as this value is kept. `has_changed` returns true if
/// everything was given back since the call began.
pub(crate) type Underway = watch::Receiver<()>;

/// A value that has taken something, and has to give it back.
pub(crate) trait Holder: Send + Sync {
    /// Begins to give everything back. From then on, the calls that do so count as
    /// [underway](Owed::begin).
    fn give_back(&self);
}

impl Owed {
    /// Begins a call. `shutdown` waits for it until the returned value is dropped.
    pub(crate) fn begin(&self) -> Underway {
        self.underway.subscribe()
    }

    /// Returns a check's places if the caller has given the check an id, since another try in this
    /// process may then use the same places.
    pub(crate) fn shared_places(&self, check: &Check, is_local: bool) -> Option<Arc<SharedPlaces>> {
        let mut digest = check.id()?.0.wrapping_add(is_local.into());
        for charge in check.charges().filter(|charge| charge.takes_place()) {
            digest = digest.wrapping_add(charge.digest(&self.digester));
        }
        let mut shared = lock(&self.shared);
        if let Some(known) = shared.get(&digest).and_then(Weak::upgrade) {
            return Some(known);
        }
        make_room(&mut shared, |places| places.strong_count() > 0);
        let new = Arc::default();
        shared.insert(digest, Arc::downgrade(&new));
        Some(new)
    }

    /// Registers a holder that may have something to give back from now on. A holder may register
    /// several times.
    pub(crate) fn register<H: Holder + 'static>(&self, holder: &Arc<H>) {
        let holder: Weak<dyn Holder> = Arc::downgrade(holder) as _;
        let mut holders = lock(&self.holders);
        holders.retain(|other| other.strong_count() > 0 && !other.ptr_eq(&holder));
        holders.push(holder);
    }

    /// Lets all holders give everything back.
    pub(crate) fn give_back(&self) {
        self.underway.send_replace(());
        for holder in lock(&self.holders).clone() {
            if let Some(holder) = holder.upgrade() {
                holder.give_back();
            }
        }
    }

    /// Waits until no call is in flight.
    pub(crate) async fn settled(&self) {
        self.underway.closed().await;
    }

    /// Makes a future that goes on if it is dropped before its end. The given `future` must not
    /// depend on its runtime's timers.
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

    /// Completes a call in a task on `runtime`. If there is no runtime, or it ends before the call
    /// does, the thread starts the call again: an ended runtime's timers do not work any more.
    pub(crate) fn complete(
        self: &Arc<Self>,
        runtime: Option<Handle>,
        call: impl Fn() -> Call + Send + Sync + 'static,
    ) {
        let mut unfinished = Unfinished {
            owed: Arc::clone(self),
            underway: self.begin(),
            call: Some(Box::new(call)),
        };
        if let Some(runtime) = runtime {
            runtime.spawn(async move {
                if let Some(call) = &unfinished.call {
                    call().await;
                }
                drop(unfinished.call.take());
            });
        }
    }

    /// Completes a call on the thread. The call is dropped if no thread can be started.
    fn on_thread(&self, call: impl Future<Output = ()> + Send + 'static) {
        let mut thread = lock(&self.thread);
        let running = thread.as_ref().and_then(WeakUnboundedSender::upgrade);
        let Some(calls) = running.or_else(start_thread) else {
            return;
        };
        *thread = Some(calls.downgrade());
        // A call that is dropped may need the thread for another call.
        drop(thread);
        let is_running = calls.clone();
        let _ = calls.send(Box::pin(async move {
            call.await;
            drop(is_running);
        }));
    }

    /// True if the current runtime is the thread's, which ends with its calls.
    #[cfg(feature = "redis")]
    pub(crate) fn is_in_brief_runtime() -> bool {
        IS_BRIEF.get()
    }
}

/// Starts the thread. It ends when all clones of the returned sender are dropped.
fn start_thread() -> Option<UnboundedSender<Call>> {
    let (sender, mut calls) = unbounded_channel();
    let thread = thread::Builder::new().name(THREAD.to_owned());
    let thread = thread.spawn(move || {
        if let Ok(runtime) = Builder::new_current_thread().enable_all().build() {
            IS_BRIEF.set(true);
            runtime.block_on(async move {
                while let Some(call) = calls.recv().await {
                    spawn::<Call>(call);
                }
            });
        }
    });
    thread.is_ok().then_some(sender)
}

/// A call that the thread starts again if this value is dropped before the call has ended.
struct Unfinished {
    owed: Arc<Owed>,
    underway: Underway,
    /// `None` once the call has ended.
    call: Option<Box<dyn Fn() -> Call + Send + Sync>>,
}

impl Drop for Unfinished {
    fn drop(&mut self) {
        if let Some(call) = self.call.take() {
            let underway = self.underway.clone();
            self.owed.on_thread(async move {
                call().await;
                drop((call, underway));
            });
        }
    }
}

/// A future that goes on if it is dropped before its end. It goes on in a task on the current
/// runtime. If there is no current runtime, or it ends, it goes on in the thread. The future needs
/// its own deadline, since no caller waits for it after the drop.
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
