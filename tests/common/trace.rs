//! Records what `tracing` is told.
#![allow(dead_code, unreachable_pub, reason = "each test binary uses a part")]

use std::collections::HashMap;
use std::fmt::Debug;
use std::sync::{Arc, Mutex};

use tracing::field::{Field, Visit};
use tracing::span::{Attributes, Id, Record};
use tracing::{Event, Metadata, Subscriber};

#[derive(Clone, Default)]
pub struct Log(Arc<Mutex<Recorded>>);

/// Names of spans by id, and lines.
type Recorded = (HashMap<u64, &'static str>, Vec<String>);

impl Log {
    pub fn lines(&self) -> Vec<String> {
        self.0.lock().unwrap().1.clone()
    }

    fn mark(&self, verb: &str, span: &Id) {
        let (names, lines) = &mut *self.0.lock().unwrap();
        lines.push(format!("{verb} {}", names[&span.into_u64()]));
    }
}

struct Message<'a>(&'a mut Vec<String>);
impl Visit for Message<'_> {
    fn record_debug(&mut self, field: &Field, value: &dyn Debug) {
        if field.name() == "message" {
            self.0.push(format!("{value:?}"));
        }
    }
}

impl Subscriber for Log {
    fn enabled(&self, _: &Metadata<'_>) -> bool {
        true
    }
    fn new_span(&self, span: &Attributes<'_>) -> Id {
        let names = &mut self.0.lock().unwrap().0;
        let id = names.len() as u64 + 1;
        names.insert(id, span.metadata().name());
        Id::from_u64(id)
    }
    fn record(&self, _: &Id, _: &Record<'_>) {}
    fn record_follows_from(&self, _: &Id, _: &Id) {}
    fn event(&self, event: &Event<'_>) {
        event.record(&mut Message(&mut self.0.lock().unwrap().1));
    }
    fn enter(&self, span: &Id) {
        self.mark("enter", span);
    }
    fn exit(&self, span: &Id) {
        self.mark("exit", span);
    }
}
