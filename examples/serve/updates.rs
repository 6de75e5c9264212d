//! The last transaction that was begun over HTTP, and whether its owner knows that it is over. A client that pushes
//! on without naming it would otherwise update the weights in one go, without the label and the digest that it gave
//! at the start.

use std::sync::{Mutex, PoisonError};

use dormouse::control::{ControlState, TransactionId};

/// See the module.
#[derive(Default)]
pub struct Updates(Mutex<Option<Last>>);

#[derive(Debug, Clone, Copy)]
struct Last {
    transaction: TransactionId,
    /// A call has ended it; which client's, nobody knows.
    aborted: bool,
}

impl Updates {
    /// One was begun: what was before is acknowledged.
    pub fn begun(&self, transaction: TransactionId) {
        self.set(Some(Last { transaction, aborted: false }));
    }

    /// A call has aborted it.
    pub fn aborted(&self, transaction: TransactionId) {
        self.set(Some(Last { transaction, aborted: true }));
    }

    /// Its owner has asked for its end, and knows.
    pub fn acknowledged(&self) {
        self.set(None);
    }

    /// The transaction that is over without anybody having acknowledged it. Only calls that can't be updates in one
    /// go belong to one that was aborted by a call.
    pub fn lost(&self, state: &ControlState, surely_part: bool) -> Option<TransactionId> {
        let last = (*self.0.lock().unwrap_or_else(PoisonError::into_inner))?;
        let over = state.transaction != Some(last.transaction);
        (over && (surely_part || !last.aborted)).then_some(last.transaction)
    }

    fn set(&self, last: Option<Last>) {
        *self.0.lock().unwrap_or_else(PoisonError::into_inner) = last;
    }
}
