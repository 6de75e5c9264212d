//! The order of the controller's answers, from its log: each has a serial number.

use std::fmt::Debug;
use std::sync::{Arc, Mutex};

use tracing::field::{Field, Visit};
use tracing::span::{Attributes, Id, Record};
use tracing::{Event, Metadata, Subscriber};

/// One answer.
#[derive(Debug, Default)]
pub(crate) struct Answer {
    pub(crate) id: String,
    serial: u64,
    /// It was refused, as another request with its id was under way.
    pub(crate) duplicate: bool,
}

/// All answers since they were last taken.
#[derive(Clone, Default)]
pub(crate) struct Log(Arc<Mutex<Vec<Answer>>>);

impl Log {
    /// Takes the place of the process's subscriber.
    pub(crate) fn install() -> Self {
        let log = Self::default();
        tracing::subscriber::set_global_default(log.clone()).expect("the only subscriber");
        log
    }

    pub(crate) fn take(&self) -> Vec<Answer> {
        let mut answers = std::mem::take(&mut *self.0.lock().unwrap());
        answers.sort_by_key(|answer| answer.serial);
        answers
    }
}

impl Visit for Answer {
    fn record_str(&mut self, field: &Field, value: &str) {
        if field.name() == "id" {
            self.id = value.to_owned();
        }
    }

    fn record_u64(&mut self, field: &Field, value: u64) {
        if field.name() == "serial" {
            self.serial = value;
        }
    }

    fn record_debug(&mut self, field: &Field, value: &dyn Debug) {
        if field.name() == "error" {
            self.duplicate = format!("{value:?}").ends_with("is under way");
        }
    }
}

impl Subscriber for Log {
    fn enabled(&self, metadata: &Metadata<'_>) -> bool {
        metadata.is_event() && metadata.target() == "dormouse::control::reply"
    }
    fn new_span(&self, _: &Attributes<'_>) -> Id {
        Id::from_u64(1)
    }
    fn record(&self, _: &Id, _: &Record<'_>) {}
    fn record_follows_from(&self, _: &Id, _: &Id) {}
    fn event(&self, event: &Event<'_>) {
        let mut answer = Answer::default();
        event.record(&mut answer);
        self.0.lock().unwrap().push(answer);
    }
    fn enter(&self, _: &Id) {}
    fn exit(&self, _: &Id) {}
}
