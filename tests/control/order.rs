//! The order of what is done, as `tracing` is told. One test: the subscriber is the whole process's.

use std::collections::HashMap;
use std::fmt::Debug;
use std::sync::Mutex;
use std::thread::ThreadId;

use dormouse::InFlight;
use dormouse::control::{ControlRequest, Operation, Tags};
use tracing::field::{Field, Visit};
use tracing::span::{Attributes, Id, Record};
use tracing::{Event, Level, Metadata, Subscriber};

use crate::support::{
    all_of, already, buffered, discard, done, load, refused, request, run, settled, sleep, spawn_with,
    tokens, wake, weights,
};

/// Lines by control id: what has the id itself, and what happens inside a span that has it.
#[derive(Default)]
struct Log(Mutex<Inner>);

#[derive(Default)]
struct Inner {
    /// Names of spans, and the ids of those that are control requests.
    spans: Vec<(&'static str, Option<String>)>,
    open: HashMap<ThreadId, Vec<usize>>,
    lines: Vec<(String, String)>,
}

static LOG: std::sync::LazyLock<Log> = std::sync::LazyLock::new(Log::default);
struct Global;

#[derive(Default)]
struct Fields {
    id: Option<String>,
    message: String,
}

impl Visit for Fields {
    fn record_debug(&mut self, field: &Field, value: &dyn Debug) {
        match field.name() {
            "message" => self.message = format!("{value:?}"),
            "id" => self.id = Some(format!("{value:?}").trim_matches('"').to_owned()),
            _ => {}
        }
    }
}

impl Inner {
    /// The control request that this thread is at.
    fn current(&self) -> Option<String> {
        let open = self.open.get(&std::thread::current().id())?;
        open.iter().rev().find_map(|span| self.spans[*span].1.clone())
    }

    fn line(&mut self, id: Option<String>, text: String) {
        let current = self.current();
        // Other tests have other ids; theirs may have begun before anybody listened.
        let own = id.filter(|id| id.starts_with("order-"));
        assert!(own.is_none() || own == current, "{text} is told outside the span of {own:?}");
        if let Some(id) = current.filter(|id| id.starts_with("order-")) {
            self.lines.push((id, text));
        }
    }
}

impl Subscriber for Global {
    fn enabled(&self, metadata: &Metadata<'_>) -> bool {
        *metadata.level() <= Level::INFO || metadata.target() == "dormouse::engine::sleep"
    }

    fn new_span(&self, span: &Attributes<'_>) -> Id {
        let mut fields = Fields::default();
        span.record(&mut fields);
        let mut inner = LOG.0.lock().unwrap();
        let id = fields.id.filter(|_| span.metadata().name() == "control");
        inner.spans.push((span.metadata().name(), id));
        Id::from_u64(inner.spans.len() as u64)
    }

    fn record(&self, _: &Id, _: &Record<'_>) {}
    fn record_follows_from(&self, _: &Id, _: &Id) {}

    fn event(&self, event: &Event<'_>) {
        let mut fields = Fields::default();
        event.record(&mut fields);
        LOG.0.lock().unwrap().line(fields.id, fields.message);
    }

    fn enter(&self, span: &Id) {
        let mut inner = LOG.0.lock().unwrap();
        let at = span.into_u64() as usize - 1;
        inner.open.entry(std::thread::current().id()).or_default().push(at);
        let name = inner.spans[at].0;
        if name != "control" {
            inner.line(None, format!("enter {name}"));
        }
    }

    fn exit(&self, span: &Id) {
        let mut inner = LOG.0.lock().unwrap();
        let at = span.into_u64() as usize - 1;
        let name = inner.spans[at].0;
        if name != "control" {
            inner.line(None, format!("exit {name}"));
        }
        inner.open.entry(std::thread::current().id()).or_default().pop();
    }
}

/// What happened inside the one span of a control request.
#[track_caller]
fn lines(id: &str) -> Vec<String> {
    let inner = LOG.0.lock().unwrap();
    let spans = inner.spans.iter().filter(|(_, other)| other.as_deref() == Some(id)).count();
    assert_eq!(spans, 1, "one span for each control request");
    inner.lines.iter().filter(|(other, _)| other == id).map(|(_, line)| line.clone()).collect()
}

/// These lines are there, each once and in this order.
#[track_caller]
fn assert_order(id: &str, expected: &[&str]) {
    let lines = lines(id);
    let at = |text: &&str| {
        assert_eq!(lines.iter().filter(|line| line == text).count(), 1, "{text}: {lines:?}");
        lines.iter().position(|line| line == text).unwrap()
    };
    let places: Vec<_> = expected.iter().map(at).collect();
    assert!(places.is_sorted(), "{lines:?}");
}

#[test]
fn c01_b75_a_sleep_settles_before_it_frees_and_each_control_request_has_its_span_and_two_lines() {
    tracing::subscriber::set_global_default(Global).unwrap();
    let w0 = weights(1);
    let handle = spawn_with(buffered(20), &w0);
    let mut running = handle.submit(request(1).max_new_tokens(60).stream(true)).unwrap();
    drop(tokens(&mut running, 1));
    let named = |operation, id: &str| ControlRequest::new(operation).id(id);

    refused(&handle, named(sleep(Tags::ALL, InFlight::Refuse), "order-refused"));
    assert_order("order-refused", &["received", "refused"]);
    assert!(!lines("order-refused").contains(&"enter sleep".to_owned()), "the engine was left alone");

    let slept = done(&handle, named(discard(InFlight::Abort), "order-sleep"));
    assert_eq!(settled(&slept).aborted, [running.id()]);
    let phases = ["enter sleep_discarding", "requests settled", "asleep", "exit sleep_discarding"];
    let around = |phases: &[&'static str], end| [&["received"][..], phases, &[end]].concat();
    assert_order("order-sleep", &around(&phases, "done"));

    already(&handle, named(sleep(Tags::ALL, InFlight::Abort), "order-again"));
    assert_order("order-again", &around(&[], "already"));
    done(&handle, named(load(all_of(&w0)), "order-load"));
    assert_order("order-load", &around(&[], "done"));
    assert!(lines("order-load").len() > 2, "phases are inside");
    done(&handle, named(wake(Tags::ALL), "order-wake"));
    assert_order("order-wake", &around(&[], "done"));
    assert!(lines("order-wake").len() > 2);

    // Those that are answered at once have no phases, but their lines.
    done(&handle, named(Operation::Status, "order-status"));
    assert_order("order-status", &["received", "done"]);

    done(&handle, sleep(Tags::KV_CACHE, InFlight::Refuse));
    let begin = Operation::Begin { options: dormouse::UpdateOptions::default(), idle: None };
    let transaction = done(&handle, named(begin, "order-begin")).state_after.transaction.unwrap();
    let push = Operation::Push { transaction, weights: all_of(&w0) };
    done(&handle, named(push, "order-push"));
    assert_order("order-push", &around(&[], "done"));
    refused(&handle, named(wake(Tags::ALL), "order-meanwhile"));
    assert_order("order-meanwhile", &around(&[], "refused"));
    done(&handle, named(Operation::Commit { transaction }, "order-commit"));
    assert_order("order-commit", &around(&[], "done"));
    assert_order("order-begin", &around(&[], "done"));
    run(&handle, Operation::Status);
}
