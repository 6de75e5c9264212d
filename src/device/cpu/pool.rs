//! Worker threads that share out the tasks of one operation.
//!
//! A dispatch publishes a job, the caller works on it too, and whoever is free joins. The caller waits only
//! for workers that joined: one that the system has not scheduled does not hold it up. Idle workers spin for
//! a short while (the next operation is microseconds away while a model runs) and then sleep.
#![allow(unsafe_code, reason = "workers run a closure that the caller's stack frame keeps alive")]

use std::any::Any;
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::sync::Arc;
use std::sync::atomic::{AtomicPtr, AtomicU64, AtomicUsize, Ordering};
use std::thread::{JoinHandle, Thread};
use std::time::{Duration, Instant};

use parking_lot::{Condvar, Mutex};

use crate::device::DeviceError;

/// How long an idle worker, or a caller at the end of a job, spins before it sleeps.
const SPIN: Duration = Duration::from_micros(100);

/// `state`: the job's number in the upper half, then whether it can be joined, then how many workers did.
const OPEN: u64 = 1 << 31;
const ACTIVE: u64 = OPEN - 1;
/// Set for good when the pool is dropped.
const STOP: u64 = 1 << 63;
const JOB: u64 = 1 << 32;

/// The indices of a job's tasks, each handed out once.
#[derive(Debug)]
pub(super) struct Tasks {
    next: AtomicUsize,
    count: usize,
}

impl Tasks {
    fn new(count: usize) -> Self {
        Self { next: AtomicUsize::new(0), count }
    }

    /// A task that nobody has taken yet.
    pub(super) fn next(&self) -> Option<usize> {
        let task = self.next.fetch_add(1, Ordering::Relaxed);
        (task < self.count).then_some(task)
    }
}

/// What one thread does of a job: takes tasks until there are none.
type Work<'a> = &'a (dyn Fn(&Tasks) + Sync);

struct Job<'a> {
    work: Work<'a>,
    tasks: Tasks,
    panic: Mutex<Option<Box<dyn Any + Send>>>,
    caller: Thread,
}

impl Job<'_> {
    fn participate(&self) {
        if let Err(payload) = catch_unwind(AssertUnwindSafe(|| (self.work)(&self.tasks))) {
            self.panic.lock().get_or_insert(payload);
        }
    }
}

struct Shared {
    state: AtomicU64,
    /// The job of `state`; valid while it is open or has active workers.
    job: AtomicPtr<Job<'static>>,
    sleepers: AtomicUsize,
    lock: Mutex<()>,
    wake: Condvar,
    spin: Duration,
}

/// The workers of a device: one fewer than its threads, as the caller is one.
pub(super) struct Pool {
    shared: Arc<Shared>,
    workers: Vec<JoinHandle<()>>,
    /// Held by the caller whose job the workers do.
    turn: Mutex<()>,
}

impl std::fmt::Debug for Pool {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Pool").field("threads", &self.threads()).finish_non_exhaustive()
    }
}

impl Pool {
    /// Starts `threads - 1` workers.
    ///
    /// # Errors
    /// [`DeviceError::Thread`]; those already started are stopped.
    pub(super) fn new(threads: usize) -> Result<Self, DeviceError> {
        Self::named(threads, "dormouse-cpu")
    }

    /// [`Pool::new`], with the workers' name.
    pub(super) fn named(threads: usize, name: &str) -> Result<Self, DeviceError> {
        let cores = std::thread::available_parallelism().map_or(1, usize::from);
        let shared = Arc::new(Shared {
            state: AtomicU64::new(0),
            job: AtomicPtr::new(std::ptr::null_mut()),
            sleepers: AtomicUsize::new(0),
            lock: Mutex::new(()),
            wake: Condvar::new(),
            // With more threads than cores, who spins keeps another from working.
            spin: if threads > cores { Duration::ZERO } else { SPIN },
        });
        let mut pool = Self { shared, workers: Vec::new(), turn: Mutex::new(()) };
        for index in 1..threads {
            let shared = Arc::clone(&pool.shared);
            let worker = std::thread::Builder::new()
                .name(format!("{name}-{index}"))
                .spawn(move || shared.serve())
                .map_err(|source| DeviceError::Thread { index, source })?;
            pool.workers.push(worker);
        }
        Ok(pool)
    }

    /// Threads that work on a job: the workers and the caller.
    pub(super) fn threads(&self) -> usize {
        self.workers.len() + 1
    }

    /// Calls `work(task)` once for each of `0..count`, on several threads.
    ///
    /// # Panics
    /// With the first panic of a task, when no thread works on any.
    pub(super) fn for_each(&self, count: usize, work: &(dyn Fn(usize) + Sync)) {
        if count == 1 {
            return work(0);
        }
        self.run(count, &|tasks| {
            while let Some(task) = tasks.next() {
                work(task);
            }
        });
    }

    /// Calls `work` on several threads, each of which takes from the same `count` tasks until there are none.
    ///
    /// # Panics
    /// As [`Pool::for_each`].
    pub(super) fn run(&self, count: usize, work: Work<'_>) {
        // Callers in other threads, and a task that dispatches, work alone: results don't depend on it.
        let turn = if count > 1 && !self.workers.is_empty() { self.turn.try_lock() } else { None };
        let Some(turn) = turn else {
            return work(&Tasks::new(count));
        };
        let job =
            Job { work, tasks: Tasks::new(count), panic: Mutex::new(None), caller: std::thread::current() };
        self.shared.publish(&job);
        job.participate();
        self.shared.close();
        drop(turn);
        if let Some(payload) = job.panic.into_inner() {
            resume_unwind(payload);
        }
    }
}

impl Drop for Pool {
    fn drop(&mut self) {
        self.shared.state.fetch_or(STOP, Ordering::SeqCst);
        drop(self.shared.lock.lock());
        self.shared.wake.notify_all();
        for worker in self.workers.drain(..) {
            // A worker catches its tasks' panics, so it ends well; in a drop there is nobody to tell anyway.
            let _ = worker.join();
        }
    }
}

impl Shared {
    /// Opens `job` to the workers. The caller keeps it alive until [`Shared::close`] has returned.
    fn publish(&self, job: &Job<'_>) {
        self.job.store(std::ptr::from_ref(job).cast_mut().cast(), Ordering::Relaxed);
        let before = self.state.load(Ordering::Relaxed);
        let number = (before & !(STOP | OPEN | ACTIVE)).wrapping_add(JOB) & !STOP;
        // SeqCst, here and in `sleep`: either the worker sees this job or we see that it sleeps.
        self.state.store(number | OPEN, Ordering::SeqCst);
        if self.sleepers.load(Ordering::SeqCst) > 0 {
            drop(self.lock.lock());
            self.wake.notify_all();
        }
    }

    /// Lets no more workers join, and waits for those that did.
    fn close(&self) {
        let mut state = self.state.fetch_and(!OPEN, Ordering::AcqRel);
        let start = Instant::now();
        while state & ACTIVE != 0 {
            if start.elapsed() < self.spin {
                std::hint::spin_loop();
            } else {
                // The last worker unparks us.
                std::thread::park();
            }
            state = self.state.load(Ordering::Acquire);
        }
    }

    /// A worker's life.
    fn serve(&self) {
        let mut seen = 0;
        loop {
            let state = self.await_job(seen);
            if state & STOP != 0 {
                return;
            }
            seen = state & !(OPEN | ACTIVE);
            if self.join(seen) {
                self.work();
            }
        }
    }

    /// The state once it has an open job other than `seen`, or [`STOP`].
    fn await_job(&self, seen: u64) -> u64 {
        let news = |state: u64| state & STOP != 0 || (state & OPEN != 0 && state & !(OPEN | ACTIVE) != seen);
        let start = Instant::now();
        loop {
            for _ in 0..16 {
                let state = self.state.load(Ordering::Acquire);
                if news(state) {
                    return state;
                }
                std::hint::spin_loop();
            }
            if start.elapsed() >= self.spin {
                break;
            }
        }
        let mut guard = self.lock.lock();
        self.sleepers.fetch_add(1, Ordering::SeqCst);
        let mut state = self.state.load(Ordering::SeqCst);
        while !news(state) {
            self.wake.wait(&mut guard);
            state = self.state.load(Ordering::SeqCst);
        }
        self.sleepers.fetch_sub(1, Ordering::SeqCst);
        state
    }

    /// Becomes an active worker of job `number`, if it is still open.
    fn join(&self, number: u64) -> bool {
        let joined = self.state.fetch_update(Ordering::AcqRel, Ordering::Acquire, |state| {
            (state & !ACTIVE == number | OPEN).then_some(state + 1)
        });
        joined.is_ok()
    }

    /// Works on the job that was joined, and leaves it.
    fn work(&self) {
        let job = self.job.load(Ordering::Relaxed);
        // SAFETY: `publish` stored the pointer before it opened the job, and joining saw it open; its owner
        // does not return from `close`, and so keeps it alive, while this worker counts as active.
        let job = unsafe { &*job };
        job.participate();
        let caller = job.caller.clone();
        let before = self.state.fetch_sub(1, Ordering::AcqRel);
        // From here on `job` may be gone.
        if before & (OPEN | ACTIVE) == 1 {
            caller.unpark();
        }
    }
}
