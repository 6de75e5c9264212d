//! The primitives that the controller's threads meet at, so that a model checker can take their place.

#[cfg(not(feature = "shuttle"))]
mod real {
    use std::time::Instant;

    pub(in crate::control) use std::thread;

    /// A mutex without poisoning.
    #[derive(Debug, Default)]
    pub(in crate::control) struct Mutex<T>(parking_lot::Mutex<T>);
    pub(in crate::control) type Guard<'a, T> = parking_lot::MutexGuard<'a, T>;

    impl<T> Mutex<T> {
        pub(in crate::control) fn new(value: T) -> Self {
            Self(parking_lot::Mutex::new(value))
        }

        pub(in crate::control) fn lock(&self) -> Guard<'_, T> {
            self.0.lock()
        }
    }

    #[derive(Debug, Default)]
    pub(in crate::control) struct Condvar(parking_lot::Condvar);

    impl Condvar {
        pub(in crate::control) fn wait<'a, T>(&self, mut guard: Guard<'a, T>) -> Guard<'a, T> {
            self.0.wait(&mut guard);
            guard
        }

        /// Waits, at most until then if there is a then.
        pub(in crate::control) fn wait_until<'a, T>(
            &self,
            mut guard: Guard<'a, T>,
            until: Option<Instant>,
        ) -> Guard<'a, T> {
            match until {
                Some(until) => drop(self.0.wait_until(&mut guard, until)),
                None => self.0.wait(&mut guard),
            }
            guard
        }

        pub(in crate::control) fn notify_all(&self) {
            self.0.notify_all();
        }
    }
}

/// Under the model checker there is no time: a deadline passes only if nobody else can run.
#[cfg(feature = "shuttle")]
mod real {
    use std::time::Instant;

    pub(in crate::control) use shuttle::thread;

    #[derive(Debug, Default)]
    pub(in crate::control) struct Mutex<T>(shuttle::sync::Mutex<T>);
    pub(in crate::control) type Guard<'a, T> = shuttle::sync::MutexGuard<'a, T>;

    impl<T> Mutex<T> {
        pub(in crate::control) fn new(value: T) -> Self {
            Self(shuttle::sync::Mutex::new(value))
        }

        pub(in crate::control) fn lock(&self) -> Guard<'_, T> {
            self.0.lock().unwrap_or_else(|poisoned| poisoned.into_inner())
        }
    }

    #[derive(Debug, Default)]
    pub(in crate::control) struct Condvar(shuttle::sync::Condvar);

    impl Condvar {
        pub(in crate::control) fn wait<'a, T>(&self, guard: Guard<'a, T>) -> Guard<'a, T> {
            self.0.wait(guard).unwrap_or_else(|poisoned| poisoned.into_inner())
        }

        pub(in crate::control) fn wait_until<'a, T>(
            &self,
            guard: Guard<'a, T>,
            _until: Option<Instant>,
        ) -> Guard<'a, T> {
            self.wait(guard)
        }

        pub(in crate::control) fn notify_all(&self) {
            self.0.notify_all();
        }
    }
}

pub(super) use real::{Condvar, Guard, Mutex, thread};
