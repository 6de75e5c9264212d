//! What the threads of one life of a controller share: the controller, what they asked it, and what came back.

use std::future::Future;
use std::pin::pin;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::task::{Context, Poll, Wake, Waker};
use std::thread::Thread;

use dormouse::control::{ControlResponse, GenerationToken, Handle, TransactionId};
use dormouse::{Request, RequestOutput};

use crate::kind::Kind;
use crate::oracle::Oracle;
use crate::watch::Watch;

pub(crate) struct World {
    pub(crate) handle: Handle,
    pub(crate) oracle: &'static Oracle,
    pub(crate) watch: Arc<Watch>,
    /// Nothing new is begun.
    pub(crate) over: AtomicBool,
    /// The controller is stopped in the middle of it all.
    pub(crate) stops: bool,
    /// Nothing that ends requests is asked for: each goes to its own end.
    pub(crate) gentle: bool,
    /// The transaction that was begun last, and the set and part it brings.
    pub(crate) open: Mutex<Option<Open>>,
    pub(crate) asked: Mutex<Vec<Arc<Asked>>>,
    /// Ids of requests whose answers nobody waited for.
    pub(crate) dropped: Mutex<Vec<String>>,
    pub(crate) ended: Mutex<Vec<Ended>>,
    pub(crate) tally: Tally,
}

#[derive(Debug, Clone, Copy)]
pub(crate) struct Open {
    pub(crate) id: TransactionId,
    pub(crate) set: usize,
    pub(crate) partial: bool,
}

/// A control request and its answer.
#[derive(Debug)]
pub(crate) struct Asked {
    pub(crate) kind: Kind,
    pub(crate) deadline: bool,
    pub(crate) response: ControlResponse,
}

/// A request that was read to its end.
pub(crate) struct Ended {
    /// Without what it carried.
    pub(crate) request: Request,
    /// By sample: tokens that it carried when it was submitted.
    pub(crate) carried: Vec<usize>,
    pub(crate) output: RequestOutput,
    /// The tokens that came, if all were taken.
    pub(crate) streamed: Option<Vec<GenerationToken>>,
}

/// The test's own count of what it did.
#[derive(Default)]
pub(crate) struct Tally {
    pub(crate) tickets: AtomicU64,
    pub(crate) names: AtomicU64,
    pub(crate) accepted: AtomicU64,
    pub(crate) refused: AtomicU64,
    /// Generations dropped before their end.
    pub(crate) dropped: AtomicU64,
}

pub(crate) fn add(counter: &AtomicU64) -> u64 {
    counter.fetch_add(1, Ordering::Relaxed)
}

pub(crate) fn get(counter: &AtomicU64) -> u64 {
    counter.load(Ordering::Relaxed)
}

impl World {
    pub(crate) fn is_over(&self) -> bool {
        self.over.load(Ordering::Relaxed)
    }
}

struct Unpark(Thread);

impl Wake for Unpark {
    fn wake(self: Arc<Self>) {
        self.0.unpark();
    }
}

/// A runtime of one task.
pub(crate) fn block_on<F: Future>(future: F) -> F::Output {
    let mut future = pin!(future);
    let waker = Waker::from(Arc::new(Unpark(std::thread::current())));
    loop {
        match future.as_mut().poll(&mut Context::from_waker(&waker)) {
            Poll::Ready(output) => return output,
            Poll::Pending => std::thread::park(),
        }
    }
}
