//! The thread that runs the engine's steps while the engine is on loan.

use std::panic::{AssertUnwindSafe, catch_unwind};

use super::board::Board;
use super::shared::{Shared, Task};
use crate::RequestOutput;
use crate::engine::{Awake, Engine, EngineStats, StepError, StepOutput};

/// Steps that may fail one after another before the requests in flight are given up.
const MAX_FAILURES: u32 = 3;

/// Runs steps and aborts until the controller stops.
pub(super) fn run(shared: &Shared) {
    let _guard = Guard(shared);
    while let Some((task, engine)) = shared.next_task() {
        let stepping = matches!(task, Task::Step);
        let did = catch_unwind(AssertUnwindSafe(|| perform(&engine, task)));
        // Before the board hears of it: the owner must find its share to be the only one.
        drop(engine);
        shared.task_done(|board| match did {
            Ok((did, stats)) => board.post(did, stats),
            // It may yet give what the requests have.
            Err(_) if stepping => board.break_down("a step panicked"),
            Err(_) => {
                board.break_down("an abort panicked");
                board.give_up("an abort panicked");
                board.look = false;
            }
        });
    }
}

/// Lets nobody wait for a stepper that is gone, by a panic of our own.
struct Guard<'a>(&'a Shared);

impl Drop for Guard<'_> {
    fn drop(&mut self) {
        if std::thread::panicking() {
            self.0.fail();
        }
    }
}

enum Did {
    Stepped(Result<StepOutput, StepError>),
    Aborted(Vec<RequestOutput>),
    Looked,
}

fn perform(engine: &Engine<Awake>, task: Task) -> (Did, EngineStats) {
    let did = match task {
        Task::Step => Did::Stepped(engine.step()),
        Task::Abort(ids) => Did::Aborted(engine.abort(&ids).outputs),
        Task::Look => Did::Looked,
    };
    (did, engine.stats())
}

impl Board {
    fn post(&mut self, did: Did, stats: EngineStats) {
        self.stats = stats;
        match did {
            Did::Stepped(Ok(output)) => {
                (self.failures, self.step_error) = (0, None);
                self.post_tokens(output.tokens);
                self.post_outputs(output.outputs);
            }
            Did::Stepped(Err(error @ StepError::Poisoned)) => self.break_down(&error.to_string()),
            Did::Stepped(Err(error)) => self.step_failed(&error.to_string()),
            Did::Aborted(outputs) => self.post_outputs(outputs),
            Did::Looked => self.look = false,
        }
    }

    /// The next step may do better, some times.
    fn step_failed(&mut self, message: &str) {
        self.step_error = Some(message.to_owned());
        self.failures += 1;
        let (text, failures) = (message.to_owned(), self.failures);
        self.after(move || tracing::error!(error = text, failures, "a step failed"));
        if self.failures >= MAX_FAILURES {
            self.failures = 0;
            self.fail_all(message);
        }
    }

    /// No step will succeed any more: what is in flight fails, and nothing is accepted until the engine has
    /// slept.
    fn break_down(&mut self, message: &str) {
        let text = message.to_owned();
        self.after(move || tracing::error!(error = text, "the engine is broken"));
        self.step_error = Some(message.to_owned());
        self.broken = true;
        self.frozen = true;
        self.fail_all(message);
    }
}
