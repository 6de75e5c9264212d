//! Threads that control: one operation after another, each answered once.

use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::thread;
use std::time::Duration;

use dormouse::control::{AbortTarget, ControlError, ControlRequest, Lifecycle, Report, Tags, Ticket};

use crate::dice::Dice;
use crate::kind::{Half, Kind};
use crate::world::{Asked, Open, World, add, block_on};

/// A request that has not been answered.
struct Sent<'a> {
    kind: Kind,
    id: String,
    deadline: Option<Duration>,
    ticket: Ticket,
    _waiting: crate::watch::Waiting<'a>,
}

impl World {
    fn send(&self, kind: Kind, id: Option<String>, deadline: Option<Duration>) -> Sent<'_> {
        let named = id.is_some();
        let id = id.unwrap_or_default();
        let operation = kind.operation(self.oracle);
        let waiting = self.watch.begin(format!("control {id}, {deadline:?}: {kind:?}"));
        let request = ControlRequest { id: named.then(|| id.clone()), operation, deadline };
        add(&self.tally.tickets);
        let ticket = self.handle.control(request);
        Sent { kind, id, deadline, ticket, _waiting: waiting }
    }

    fn answered(&self, sent: Sent<'_>, awaits: bool) -> Arc<Asked> {
        let Sent { kind, id, deadline, ticket, _waiting } = sent;
        let response = if awaits { block_on(ticket) } else { ticket.wait() };
        assert!(id.is_empty() || response.id == id, "{} is the answer to {id}", response.id);
        assert_eq!(response.operation, kind.operation(self.oracle).name());
        if let Err(ControlError::Stopped) = response.outcome {
            assert!(self.stops, "nobody stopped it");
            self.over.store(true, Ordering::Relaxed);
        }
        check_report(&response.report);
        let asked = Arc::new(Asked { kind, deadline: deadline.is_some(), response });
        self.asked.lock().unwrap().push(Arc::clone(&asked));
        asked
    }

    fn name(&self) -> String {
        format!("asked-{}", add(&self.tally.names))
    }

    /// Asks for an operation and waits for the answer.
    pub(crate) fn ask(&self, kind: Kind) -> Arc<Asked> {
        let sent = self.send(kind, Some(self.name()), None);
        self.answered(sent, false)
    }

    /// The same in any way that there is.
    fn ask_somehow(&self, dice: &mut Dice, kind: Kind) -> Option<Arc<Asked>> {
        if self.gentle && kind.ends_requests() {
            return None;
        }
        let deadline = dice.one_in(6).then(|| Duration::from_micros(dice.pick(&[0, 100, 1000, 5000])));
        if dice.one_in(12) {
            let id = self.name();
            // Two with one name: the second is refused if the first was not answered by then.
            let first = self.send(kind.clone(), Some(id.clone()), deadline);
            let second = self.send(if dice.one_in(2) { Kind::Status } else { kind }, Some(id), None);
            let first = self.answered(first, dice.one_in(2));
            self.answered(second, dice.one_in(2));
            return Some(first);
        }
        // The automaton must know what a transaction has.
        if dice.one_in(20) && !matches!(kind, Kind::Push { .. }) {
            let id = self.name();
            self.dropped.lock().unwrap().push(id.clone());
            drop(self.send(kind, Some(id), deadline).ticket);
            return None;
        }
        let id = (!dice.one_in(4)).then(|| self.name());
        let sent = self.send(kind, id, deadline);
        Some(self.answered(sent, dice.one_in(4)))
    }

    /// An operation of any kind, or several that belong together.
    pub(crate) fn operate(&self, dice: &mut Dice) {
        let open = *self.open.lock().unwrap();
        let kind = match (dice.below(10), open) {
            // Many operations lead on, or the engine would sleep all the time.
            (0..=2, _)
                if self.is_serving() || !dice.one_in(4) && self.handle.state().transaction.is_some() =>
            {
                return thread::sleep(Duration::from_micros(100));
            }
            (0..=2, _) => self.next_step(),
            (3, _) => return self.transact(dice),
            (4 | 5, _) => return self.cycle(dice),
            (6, Some(open)) => match dice.below(3) {
                0 => Kind::Commit(open.id),
                1 => Kind::Abandon(open.id),
                _ => {
                    let half = half(dice, open.partial);
                    Kind::push(dice, open.id, half, open.set)
                }
            },
            _ => Kind::any(dice),
        };
        self.ask_somehow(dice, kind);
    }

    /// The loop of a trainer.
    fn cycle(&self, dice: &mut Dice) {
        for kind in
            [Kind::sleep(dice), Kind::WakeUp(Tags::WEIGHTS), Kind::update(dice), Kind::WakeUp(Tags::ALL)]
        {
            self.ask_somehow(dice, kind);
        }
    }

    /// A transaction from its begin to its end, or to where others end it.
    fn transact(&self, dice: &mut Dice) {
        if dice.one_in(2) {
            let asleep = Kind::sleep(dice);
            self.ask_somehow(dice, asleep);
            self.ask(Kind::WakeUp(Tags::WEIGHTS));
        }
        let kind = Kind::begin(dice);
        let Kind::Begin { set, partial, .. } = kind else { unreachable!("a begin begins") };
        let begun = self.ask(kind);
        let id = begun.response.report.iter().find_map(|report| match report {
            Report::Begun(id) => Some(*id),
            _ => None,
        });
        assert_eq!(id.is_some(), begun.response.is_ok(), "{begun:?}");
        let Some(id) = id else { return };
        *self.open.lock().unwrap() = Some(Open { id, set, partial });
        let halves: &[Half] = if partial { &[Half::One] } else { &[Half::Second, Half::First] };
        for &half in halves {
            if dice.one_in(4) {
                thread::sleep(Duration::from_micros(dice.next() % 3000));
            }
            if !dice.one_in(8) {
                let kind = Kind::push(dice, id, half, set);
                self.ask_somehow(dice, kind);
            }
        }
        match dice.below(8) {
            0 => {}
            1 => drop(self.ask_somehow(dice, Kind::Abandon(id))),
            _ => drop(self.ask_somehow(dice, Kind::Commit(id))),
        }
    }

    /// What leads from the state of now to one that serves.
    pub(crate) fn next_step(&self) -> Kind {
        let state = self.handle.state();
        match state.lifecycle {
            _ if state.transaction.is_some() => Kind::Abandon(state.transaction.expect("it is there")),
            _ if state.paused => Kind::Resume,
            Lifecycle::SleepingKept | Lifecycle::WeightsLoaded => Kind::WakeUp(Tags::ALL),
            Lifecycle::SleepingDiscarded => Kind::WakeUp(Tags::WEIGHTS),
            Lifecycle::AwaitingWeights | Lifecycle::WeightsTorn => Kind::UpdateModelWeight(None),
            Lifecycle::Awake | Lifecycle::Stopped => Kind::Status,
        }
    }

    pub(crate) fn is_serving(&self) -> bool {
        let state = self.handle.state();
        state.admitting && state.transaction.is_none()
    }

    /// Brings the engine to where it serves, whatever others do, if nobody else does for a while.
    pub(crate) fn nurse(&self, patience: u32) {
        for _ in 0..patience {
            if self.is_serving() {
                return;
            }
            thread::sleep(Duration::from_millis(1));
        }
        for _ in 0..8 {
            if self.is_serving() {
                return;
            }
            self.ask(self.next_step());
        }
    }

    /// Ends these; returns whether they are said to have ended.
    pub(crate) fn abort(&self, dice: &mut Dice, target: AbortTarget) -> bool {
        self.ask_somehow(dice, Kind::Abort(target)).is_some_and(|asked| asked.response.is_ok())
    }
}

fn half(dice: &mut Dice, partial: bool) -> Half {
    if partial { Half::One } else { dice.pick(&[Half::First, Half::Second]) }
}

/// No request is settled twice.
fn check_report(report: &[Report]) {
    let mut settled = Vec::<dormouse::RequestId>::new();
    for report in report {
        match report {
            Report::Settled(report) => {
                let lists = [&report.drained, &report.aborted, &report.retracted, &report.kept];
                settled.extend(lists.into_iter().flatten());
            }
            Report::Sleep(report) => {
                let report = &report.settled;
                let lists = [&report.drained, &report.aborted, &report.retracted];
                settled.extend(lists.into_iter().flatten());
            }
            _ => {}
        }
    }
    let all = settled.len();
    settled.sort_unstable();
    settled.dedup();
    assert_eq!(settled.len(), all, "a request is settled twice: {report:?}");
}
