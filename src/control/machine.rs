//! The lifecycle at run time: what each operation does in each state. All it can do is call the typed engine.

use std::sync::Arc;
use std::time::Instant;

use super::operation::{Payload, SleepPlan, SleepWeights};
use super::owner::{Time, conflict, drain, undrained};
use super::payload::{incomplete, load, update};
use super::response::{Outcome, Report, SettledReport};
use super::shared::Shared;
use super::{ControlError, Lifecycle, MissingStep, Tags};
use crate::completion::{RequestId, RequestOutput};
use crate::engine::{
    AnyEngine, Awake, Carried, Discarded, Engine, InFlight, Kept, MemoryReport, OnDeadline, Settled,
    SleepOptions, SleepReport, Sleeping, WakeReport, WeightsLoaded,
};
use crate::weights::{LoadOptions, UpdateOptions, WeightVersion};

/// The engine, in the state that it is in.
pub(super) enum Held {
    /// On loan to the stepper, too.
    Awake(Arc<Engine<Awake>>),
    SleepingKept(Engine<Sleeping<Kept>>),
    SleepingDiscarded {
        engine: Engine<Sleeping<Discarded>>,
        /// The weights were asked to wake.
        awaiting: bool,
    },
    WeightsLoaded(Engine<WeightsLoaded>),
}

/// What an operation came to.
pub(super) struct Done {
    pub(super) outcome: Result<Outcome, ControlError>,
    pub(super) report: Vec<Report>,
}

impl From<AnyEngine> for Held {
    fn from(engine: AnyEngine) -> Self {
        match engine {
            AnyEngine::Awake(engine) => {
                engine.abort_all();
                Self::Awake(Arc::new(engine))
            }
            AnyEngine::SleepingKept(mut engine) => {
                drop((engine.take_settled(), engine.abort_retracted()));
                Self::SleepingKept(engine)
            }
            AnyEngine::SleepingDiscarded(mut engine) => {
                drop((engine.take_settled(), engine.abort_retracted()));
                Self::SleepingDiscarded { engine, awaiting: false }
            }
            AnyEngine::WeightsLoaded(mut engine) => {
                drop((engine.take_settled(), engine.abort_retracted()));
                Self::WeightsLoaded(engine)
            }
        }
    }
}

impl Held {
    pub(super) fn lifecycle(&self) -> Lifecycle {
        match self {
            Self::Awake(_) => Lifecycle::Awake,
            Self::SleepingKept(_) => Lifecycle::SleepingKept,
            Self::SleepingDiscarded { awaiting: false, .. } => Lifecycle::SleepingDiscarded,
            Self::SleepingDiscarded { awaiting: true, .. } => Lifecycle::AwaitingWeights,
            Self::WeightsLoaded(engine) if engine.version().is_none() => Lifecycle::WeightsTorn,
            Self::WeightsLoaded(_) => Lifecycle::WeightsLoaded,
        }
    }

    /// Version of the weights, or the last that the state knows of.
    pub(super) fn version(&self) -> Option<WeightVersion> {
        match self {
            Self::Awake(engine) => Some(engine.version()),
            Self::SleepingKept(engine) => engine.report().version.clone(),
            Self::SleepingDiscarded { engine, .. } => engine.report().version.clone(),
            Self::WeightsLoaded(engine) => engine.version(),
        }
    }

    pub(super) fn memory(&self) -> MemoryReport {
        match self {
            Self::Awake(engine) => engine.memory(),
            Self::SleepingKept(engine) => engine.memory(),
            Self::SleepingDiscarded { engine, .. } => engine.memory(),
            Self::WeightsLoaded(engine) => engine.memory(),
        }
    }

    fn discarded(engine: Engine<Sleeping<Discarded>>) -> Self {
        Self::SleepingDiscarded { engine, awaiting: false }
    }
}

pub(super) fn sleep(shared: &Shared, held: Held, plan: SleepPlan, time: Time) -> (Held, Done) {
    let engine = match held {
        Held::Awake(engine) => engine,
        asleep => return sleep_on(shared, asleep, plan),
    };
    if !plan.tags.kv_cache() {
        let error = conflict(shared, "sleep of weights alone", MissingStep::SleepKvCache);
        return (Held::Awake(engine), Done::failed(error));
    }
    match settle(shared, plan.in_flight, time) {
        Ok((in_flight, drained)) => fall_asleep(shared, engine, plan, in_flight, drained),
        Err((error, drained)) => {
            shared.reopen();
            let settled = SettledReport { drained, ..SettledReport::default() };
            (Held::Awake(engine), Done { outcome: Err(error), report: vec![Report::Settled(settled)] })
        }
    }
}

/// Keeps requests out; waits for those in flight as far as the policy says. Returns what the engine is to do with
/// those that are left, and those that ran to their end.
fn settle(
    shared: &Shared,
    in_flight: InFlight,
    time: Time,
) -> Result<(InFlight, Vec<RequestId>), (ControlError, Vec<RequestId>)> {
    let paused = shared.change(|board| {
        board.shut();
        board.paused
    });
    // What was cancelled is as good as gone.
    shared.wait_for(time.until, |board| !board.any_aborting());
    let live_requests = shared.board().live_before();
    match in_flight {
        InFlight::Refuse if live_requests > 0 => Err((ControlError::InFlight { live_requests }, Vec::new())),
        InFlight::Refuse | InFlight::Abort | InFlight::Retract => Ok((in_flight, Vec::new())),
        InFlight::Drain { .. } if paused && live_requests > 0 => {
            Err((conflict(shared, "a sleep that drains", MissingStep::Resume), Vec::new()))
        }
        InFlight::Drain { deadline, then } => {
            let own = Instant::now().checked_add(deadline);
            let until = own.into_iter().chain(time.until).min();
            let (drained, left) = drain(shared, until);
            match then {
                _ if left == 0 => Ok((InFlight::Refuse, drained)),
                OnDeadline::Refuse => Err((undrained(shared, time), drained)),
                OnDeadline::Abort => Ok((InFlight::Abort, drained)),
                OnDeadline::Retract => Ok((InFlight::Retract, drained)),
            }
        }
    }
}

fn fall_asleep(
    shared: &Shared,
    engine: Arc<Engine<Awake>>,
    plan: SleepPlan,
    in_flight: InFlight,
    drained: Vec<RequestId>,
) -> (Held, Done) {
    let engine = shared.recall(engine);
    let options = SleepOptions::default().in_flight(in_flight);
    let mut settled = Settled::default();
    // Before weights are copied: who waits for an abort, or an output, need not wait for that.
    let take = |carried: &mut Carried| settled = hand_over(shared, carried, in_flight, drained.clone());
    let slept = match (plan.tags.weights(), plan.weights) {
        (true, SleepWeights::Discard) => engine.sleep_discarding_handing_over(options, take).map(|engine| {
            let report = engine.report().clone();
            (Held::discarded(engine), report)
        }),
        (weights, _) => {
            let options = if weights { options } else { options.resident() };
            engine.sleep_handing_over(options, take).map(|engine| {
                let report = engine.report().clone();
                (Held::SleepingKept(engine), report)
            })
        }
    };
    let (held, report) = match slept {
        Ok(slept) => slept,
        Err(failed) => {
            let (engine, error) = failed.into_parts();
            let engine = Arc::new(engine);
            shared.change(|board| board.shut = false);
            let _ = shared.lend(&engine);
            let settled = SettledReport { drained, ..SettledReport::default() };
            let done = Done { outcome: Err(error.into()), report: vec![Report::Settled(settled)] };
            return (Held::Awake(engine), done);
        }
    };
    let mut report = vec![Report::Sleep(SleepReport { settled, ..report })];
    if plan.tags.weights() {
        return (held, Done::ok(false, report));
    }
    // Weights that stay where they are cost nothing to restore.
    let (held, outcome) = wake_weights(held, &mut report);
    (held, Done { outcome: outcome.map(|()| Outcome::Done), report })
}

/// Takes the requests out of an engine that falls asleep: they end, or wait for the wake here, where they can be
/// aborted.
fn hand_over(
    shared: &Shared,
    carried: &mut Carried,
    in_flight: InFlight,
    drained: Vec<RequestId>,
) -> Settled {
    let outputs: Vec<RequestOutput> =
        carried.take_settled().into_iter().chain(carried.abort_retracted()).collect();
    shared.change(|board| {
        let aborted = match in_flight {
            InFlight::Abort => board.abort_before(),
            _ => Vec::new(),
        };
        board.post_outputs(outputs);
        board.slept();
        Settled { drained, aborted, retracted: board.before() }
    })
}

/// A sleep of an engine without a KV cache: only the weights can do anything.
fn sleep_on(shared: &Shared, held: Held, plan: SleepPlan) -> (Held, Done) {
    if plan.in_flight != InFlight::Abort {
        return sleep_weights(held, plan);
    }
    // All of them are aside.
    let aborted = shared.change(|board| {
        board.shut();
        board.shut = false;
        board.abort_before()
    });
    let (held, mut done) = sleep_weights(held, plan);
    if !aborted.is_empty() {
        done.outcome = done.outcome.map(|_| Outcome::Done);
        done.report.insert(0, Report::Settled(SettledReport { aborted, ..SettledReport::default() }));
    }
    (held, done)
}

fn sleep_weights(held: Held, plan: SleepPlan) -> (Held, Done) {
    let discard = plan.weights == SleepWeights::Discard;
    if !plan.tags.weights() {
        return (held, Done::ok(true, Vec::new()));
    }
    match held {
        Held::WeightsLoaded(engine) if discard => discarded(engine.discard_weights()),
        Held::WeightsLoaded(engine) => match engine.park_weights() {
            Ok(engine) => {
                let report = vec![Report::Sleep(engine.report().clone())];
                (Held::SleepingKept(engine), Done::ok(false, report))
            }
            Err(failed) => {
                let (engine, error) = failed.into_parts();
                (Held::WeightsLoaded(engine), Done::failed(error))
            }
        },
        Held::SleepingKept(engine) if discard => discarded(engine.discard_weights()),
        Held::SleepingDiscarded { engine, awaiting: true } => {
            (Held::discarded(engine), Done::ok(false, Vec::new()))
        }
        held => (held, Done::ok(true, Vec::new())),
    }
}

fn discarded(engine: Engine<Sleeping<Discarded>>) -> (Held, Done) {
    let report = vec![Report::Sleep(engine.report().clone())];
    (Held::discarded(engine), Done::ok(false, report))
}

pub(super) fn wake_up(shared: &Shared, held: Held, tags: Tags) -> (Held, Done) {
    let missing = match (&held, held.lifecycle()) {
        (_, Lifecycle::WeightsTorn) => Some(MissingStep::UpdateWeights),
        (Held::SleepingDiscarded { .. }, _) if tags == Tags::ALL => Some(MissingStep::UpdateWeights),
        (Held::SleepingDiscarded { awaiting: true, .. }, _) if tags.kv_cache() => {
            Some(MissingStep::UpdateWeights)
        }
        (Held::SleepingKept(_) | Held::SleepingDiscarded { .. }, _) if !tags.weights() => {
            Some(MissingStep::WakeWeights)
        }
        _ => None,
    };
    if let Some(missing) = missing {
        let error = conflict(shared, "wakeup", missing);
        return (held, Done::failed(error));
    }
    let before = held.lifecycle();
    let mut report = Vec::new();
    let (mut held, mut outcome) =
        if tags.weights() { wake_weights(held, &mut report) } else { (held, Ok(())) };
    if tags.kv_cache() && outcome.is_ok() {
        (held, outcome) = wake_kv_cache(shared, held, &mut report);
    }
    let already = before == held.lifecycle();
    let outcome = outcome.map(|()| if already { Outcome::Already } else { Outcome::Done });
    (held, Done { outcome, report })
}

/// Restores weights that were kept; awaits those that were discarded.
fn wake_weights(held: Held, report: &mut Vec<Report>) -> (Held, Result<(), ControlError>) {
    match held {
        Held::SleepingKept(engine) => match engine.restore_weights() {
            Ok(engine) => {
                report.push(Report::Load(engine.report().clone()));
                (Held::WeightsLoaded(engine), Ok(()))
            }
            Err(failed) => {
                let (engine, error) = failed.into_parts();
                (Held::SleepingKept(engine), Err(error.into()))
            }
        },
        Held::SleepingDiscarded { engine, .. } => {
            (Held::SleepingDiscarded { engine, awaiting: true }, Ok(()))
        }
        held => (held, Ok(())),
    }
}

fn wake_kv_cache(shared: &Shared, held: Held, report: &mut Vec<Report>) -> (Held, Result<(), ControlError>) {
    let engine = match held {
        Held::WeightsLoaded(engine) => engine,
        held => return (held, Ok(())),
    };
    match engine.wake_up() {
        Ok(engine) => {
            let engine = Arc::new(engine);
            let held = Held::Awake(Arc::clone(&engine));
            let stats = engine.stats();
            shared.change(|board| {
                board.stats = stats;
                board.shut = false;
                board.publish(held.lifecycle(), held.version(), held.memory());
            });
            drop(held);
            let resumed = shared.lend(&engine);
            report.push(Report::Wake(WakeReport { resumed, ..engine.report().clone() }));
            (Held::Awake(engine), Ok(()))
        }
        Err(failed) => {
            let (engine, error) = failed.into_parts();
            (Held::WeightsLoaded(engine), Err(error.into()))
        }
    }
}

/// Brings a complete set of weights, whatever is there.
pub(super) fn load_weights(
    shared: &Shared,
    held: Held,
    weights: Payload,
    options: LoadOptions,
    time: Time,
) -> (Held, Done) {
    let loaded = match held {
        Held::Awake(_) => {
            let error = conflict(shared, "load_weights", MissingStep::SleepKvCache);
            return (held, Done::failed(error));
        }
        held if matches!(weights, Payload::Adapter(_)) => return (held, Done::failed(incomplete())),
        Held::WeightsLoaded(mut engine) => {
            let done = update(&mut engine, weights, options.into(), time);
            return (Held::WeightsLoaded(engine), Done::of(done.map(Report::Update)));
        }
        Held::SleepingKept(engine) => load(engine, weights, options, time).map_err(|failed| {
            let (engine, error) = failed.into_parts();
            (Held::SleepingKept(engine), error)
        }),
        Held::SleepingDiscarded { engine, awaiting } => {
            load(engine, weights, options, time).map_err(|failed| {
                let (engine, error) = failed.into_parts();
                (Held::SleepingDiscarded { engine, awaiting }, error)
            })
        }
    };
    match loaded {
        Ok(engine) => {
            let report = Report::Load(engine.report().clone());
            (Held::WeightsLoaded(engine), Done::ok(false, vec![report]))
        }
        Err((held, error)) => (held, Done::failed(error)),
    }
}

/// What must come before weights can be updated in this state.
pub(super) fn missing_for_update(held: &Held) -> Option<MissingStep> {
    match held {
        Held::Awake(_) => Some(MissingStep::SleepKvCache),
        Held::SleepingKept(_) | Held::SleepingDiscarded { awaiting: false, .. } => {
            Some(MissingStep::WakeWeights)
        }
        Held::SleepingDiscarded { awaiting: true, .. } | Held::WeightsLoaded(_) => None,
    }
}

pub(super) fn update_weights(
    shared: &Shared,
    held: Held,
    weights: Payload,
    options: UpdateOptions,
    time: Time,
) -> (Held, Done) {
    if let Some(missing) = missing_for_update(&held) {
        let error = conflict(shared, "update_weights", missing);
        return (held, Done::failed(error));
    }
    match held {
        Held::WeightsLoaded(mut engine) => {
            let done = update(&mut engine, weights, options, time);
            (Held::WeightsLoaded(engine), Done::of(done.map(Report::Update)))
        }
        // There is nothing that a part could be a part of.
        held if options.partial.is_some() || matches!(weights, Payload::Adapter(_)) => {
            let error = conflict(shared, "a partial update", MissingStep::UpdateWeights);
            (held, Done::failed(error))
        }
        held => load_weights(shared, held, weights, options.load, time),
    }
}

pub(super) fn reset_prefix_cache(shared: &Shared, held: &Held, with_requests: bool) -> Done {
    let Held::Awake(engine) = held else { return Done::ok(true, Vec::new()) };
    let live_requests = shared.board().live_requests();
    if live_requests > 0 && !with_requests {
        return Done::failed(ControlError::InFlight { live_requests });
    }
    engine.clear_prefix_cache();
    shared.look();
    Done::ok(false, Vec::new())
}

pub(super) fn verify(shared: &Shared, held: &Held) -> Done {
    match held {
        Held::Awake(engine) => Done::of(engine.verify().map(Report::Verified)),
        Held::WeightsLoaded(engine) => Done::of(engine.verify().map(Report::Verified)),
        _ => Done::failed(no_weights(shared, held, "verify")),
    }
}

pub(super) fn read_tensor(shared: &Shared, held: &Held, name: &str) -> Done {
    match held {
        Held::Awake(engine) => Done::of(engine.tensor(name).map(Report::Tensor)),
        Held::WeightsLoaded(engine) => Done::of(engine.tensor(name).map(Report::Tensor)),
        _ => Done::failed(no_weights(shared, held, "read_tensor")),
    }
}

fn no_weights(shared: &Shared, held: &Held, operation: &'static str) -> ControlError {
    conflict(shared, operation, missing_for_update(held).unwrap_or(MissingStep::UpdateWeights))
}

pub(super) fn clear_load_weight(shared: &Shared, held: Held, time: Time) -> (Held, Done) {
    let plan = SleepPlan { tags: Tags::ALL, weights: SleepWeights::Discard, in_flight: InFlight::Abort };
    sleep(shared, held, plan, time)
}

pub(super) fn update_model_weight(
    shared: &Shared,
    held: Held,
    weights: Option<Payload>,
    options: LoadOptions,
    time: Time,
) -> (Held, Done) {
    if let Held::Awake(_) = held {
        let error = conflict(shared, "update_model_weight", MissingStep::SleepKvCache);
        return (held, Done::failed(error));
    }
    let reload = shared.fixed.options.reload.as_ref();
    let Some(weights) = weights.or_else(|| reload.map(super::Reload::payload)) else {
        let requirement = "must be given, as the controller has no source to reload from";
        return (held, Done::failed(ControlError::InvalidArgument { argument: "weights", requirement }));
    };
    let (held, mut done) = load_weights(shared, held, weights, options, time);
    if done.outcome.is_err() {
        return (held, done);
    }
    let (held, woken) = wake_kv_cache(shared, held, &mut done.report);
    done.outcome = woken.map(|()| Outcome::Done);
    (held, done)
}

impl Done {
    /// One phase that was done, or failed.
    pub(super) fn of<E: Into<ControlError>>(phase: Result<Report, E>) -> Self {
        match phase {
            Ok(report) => Self::ok(false, vec![report]),
            Err(error) => Self::failed(error),
        }
    }
}
