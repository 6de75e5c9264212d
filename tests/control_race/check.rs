//! What must hold when a life is over.

use std::collections::{BTreeMap, HashMap, VecDeque};
use std::sync::Arc;

use dormouse::control::{ControlError, ControlState, Metrics, Report};
use dormouse::{AnyEngine, Awake, Engine};

use crate::automaton::Automaton;
use crate::exact;
use crate::kind::Kind;
use crate::log::Answer;
use crate::oracle::{Mix, Oracle, request, was_aborted};
use crate::world::{Asked, Ended, World, get};

/// Each request was answered once, and the answers in their order are a word of the lifecycle's language.
/// Returns the automaton at the end.
pub(crate) fn history<'a>(
    world: &World,
    log: Vec<Answer>,
    first: &ControlState,
    oracle: &'a Oracle,
) -> Automaton<'a> {
    assert_eq!(log.len() as u64, get(&world.tally.tickets), "one answer for each request");
    let mut by_id: HashMap<String, VecDeque<Arc<Asked>>> = HashMap::new();
    for asked in world.asked.lock().unwrap().drain(..) {
        by_id.entry(asked.response.id.clone()).or_default().push_back(asked);
    }
    let mut dropped = std::mem::take(&mut *world.dropped.lock().unwrap());
    let mut automaton = Automaton::new(oracle, first, world.stops);
    let mut last = Some(first.clone());
    let mut epoch = first.epoch;
    let mut still = Still::default();
    for Answer { id, duplicate, .. } in log {
        let asked = by_id.get_mut(&id).and_then(|all| {
            let at = all.iter().position(|asked| is_duplicate(asked) == duplicate)?;
            all.remove(at)
        });
        let Some(asked) = asked else {
            let at = dropped.iter().position(|dropped| *dropped == id);
            still = Still::default();
            dropped.swap_remove(at.unwrap_or_else(|| panic!("{id} is answered twice")));
            last = None;
            continue;
        };
        let after = &asked.response.state_after;
        assert!(after.epoch >= epoch, "epochs go up: {asked:?}");
        epoch = after.epoch;
        still.see(&asked);
        if is_inline(&asked) {
            assert!(asked.response.state_before.epoch <= epoch, "{asked:?}");
            assert!(is_unchanged(&asked) || asked.kind.is_inline(), "nothing was begun: {asked:?}");
            continue;
        }
        match &last {
            Some(last) => automaton.between(last, &asked.response.state_before),
            None => automaton.resync(&asked.response.state_before),
        }
        automaton.step(&asked);
        content(&asked, oracle);
        last = Some(after.clone());
    }
    // What came after the last answer that somebody took may have brought versions, too.
    automaton.missed |= last.is_none();
    assert!(
        by_id.values().all(VecDeque::is_empty) && dropped.is_empty(),
        "answered, but not by the controller"
    );
    automaton
}

/// While it is paused, no step is run.
#[derive(Default)]
struct Still {
    /// Steps at the first look since it was paused.
    steps: Option<u64>,
}

impl Still {
    fn see(&mut self, asked: &Asked) {
        if !is_inline(asked) {
            self.steps = None;
        }
        for report in &asked.response.report {
            // An engine that is falling asleep has no blocks any more, and other counters.
            let Report::Status(status) = report else { continue };
            if !status.state.paused {
                self.steps = None;
            } else if status.engine.blocks > 0 {
                let steps = status.engine.steps;
                assert_eq!(*self.steps.get_or_insert(steps), steps, "a step while it is paused: {asked:?}");
            }
        }
    }
}

fn is_duplicate(asked: &Asked) -> bool {
    matches!(asked.response.outcome, Err(ControlError::DuplicateId { .. }))
}

fn is_inline(asked: &Asked) -> bool {
    let refused = matches!(
        asked.response.outcome,
        Err(ControlError::DuplicateId { .. } | ControlError::QueueFull { .. } | ControlError::Stopped)
    );
    // What waited too long for its turn is answered at any moment.
    let late = matches!(
        &asked.response.outcome,
        Err(ControlError::Deadline { during, .. }) if during.contains("turn")
    );
    refused || late || asked.kind.is_inline()
}

/// A drain that a stop ended has kept requests out, and so may the stop itself: no more than that.
fn is_unchanged(asked: &Asked) -> bool {
    let before = &asked.response.state_before;
    let mut after = asked.response.state_after.clone();
    if matches!(asked.response.outcome, Err(ControlError::Stopped)) {
        (after.epoch, after.admitting) = (before.epoch, before.admitting);
    }
    *before == after
}

/// What was read is what is there.
fn content(asked: &Asked, oracle: &Oracle) {
    let version = asked.response.state_before.version.as_ref();
    for report in &asked.response.report {
        match (&asked.kind, report) {
            (Kind::ReadTensor { .. }, Report::Tensor(tensor)) => {
                let mix = oracle.mix(&version.expect("weights").digest).expect("of a known set");
                assert_eq!(tensor.data, oracle.weights(mix).0[crate::oracle::ONE].1.data);
            }
            (Kind::Verify, Report::Verified(verified)) => assert_eq!(Some(&verified.version), version),
            _ => {}
        }
    }
}

/// Each output is what a fresh engine says, and what was streamed is the output.
pub(crate) fn outputs(ended: &[Ended], world: &World, automaton: &Automaton<'_>) {
    let oracle = world.oracle;
    for ended in ended {
        let aborted = was_aborted(&ended.output);
        assert!(!aborted || world.stops || !world.gentle, "nobody ended {:?}", ended.output);
        oracle.check(&ended.request, &ended.output);
        let versions = ended.output.completions.iter().flat_map(|completion| &completion.versions);
        for span in versions {
            let seen = automaton.versions.contains(&span.version) || automaton.missed;
            assert!(seen, "{} never was", span.version);
        }
        if let Some(tokens) = &ended.streamed {
            stream(ended, tokens);
        }
    }
}

fn stream(ended: &Ended, tokens: &[dormouse::control::GenerationToken]) {
    let mut next: BTreeMap<usize, usize> = ended.carried.iter().copied().enumerate().collect();
    assert!(ended.request.stream || tokens.is_empty(), "nobody asked for {tokens:?}");
    for token in tokens {
        let at = next.get_mut(&token.sample).expect("one of its samples");
        assert_eq!(token.position, *at, "each token once, in order: {tokens:?}");
        *at += 1;
        let completion = &ended.output.completions[token.sample];
        assert_eq!(token.token, completion.tokens[token.position]);
        assert_eq!(token.logprob.to_bits(), completion.logprobs[token.position].to_bits());
        let top = completion.top_logprobs.as_ref().map_or(&[][..], |top| &top[token.position]);
        assert_eq!(exact::top_to_bits(&token.top), exact::top_to_bits(top));
    }
    if ended.request.stream {
        let lengths = ended.output.completions.iter().map(|completion| completion.tokens.len());
        assert!(next.into_values().eq(lengths), "all tokens are streamed: {tokens:?} of {:?}", ended.output);
    }
}

/// The controller's counts are the test's.
pub(crate) fn counts(world: &World, metrics: &Metrics, ended: &[Ended]) {
    let tally = &world.tally;
    let Metrics { accepted, finished, aborted, failed, .. } = *metrics;
    assert_eq!((metrics.live_requests, metrics.requests_aside, metrics.control_queue), (0, 0, 0));
    assert_eq!(accepted, get(&tally.accepted));
    assert_eq!(failed, 0);
    assert_eq!(accepted, finished + aborted, "{metrics:?}");
    assert_eq!(metrics.refused.values().sum::<u64>(), get(&tally.refused));
    assert_eq!(metrics.operations.values().sum::<u64>(), get(&tally.tickets));
    let known_aborted = ended.iter().filter(|ended| was_aborted(&ended.output)).count() as u64;
    assert!(aborted >= known_aborted && finished >= ended.len() as u64 - known_aborted, "{metrics:?}");
    let stats = metrics.engine;
    assert_eq!((stats.live_requests, stats.waiting, stats.running, stats.blocks_owned), (0, 0, 0, 0));
    assert_eq!(stats.blocks_free + stats.blocks_cached, stats.blocks, "{stats:?}");
}

/// An engine that was given back goes on as one that was just built.
pub(crate) fn given_back(engine: AnyEngine, oracle: &Oracle) -> Engine<Awake> {
    let load = |set: usize| oracle.weights(Mix::of(set));
    let (set, loaded) = match engine {
        AnyEngine::Awake(engine) => {
            let stats = engine.stats();
            assert_eq!((stats.live_requests, stats.blocks_owned), (0, 0), "{stats:?}");
            return like_fresh(engine, oracle);
        }
        AnyEngine::SleepingKept(engine) => (None, engine.restore_weights().expect("memory")),
        AnyEngine::SleepingDiscarded(engine) => {
            (Some(1), engine.load_weights(load(1).source()).expect("complete weights"))
        }
        AnyEngine::WeightsLoaded(engine) => (None, engine),
    };
    let mut loaded = loaded;
    if set.is_none() && loaded.version().is_none() {
        loaded.update(load(2).source()).expect("complete weights");
    }
    like_fresh(loaded.wake_up().expect("memory"), oracle)
}

fn like_fresh(engine: Engine<Awake>, oracle: &Oracle) -> Engine<Awake> {
    let request = request(3);
    let output = engine.generate(std::slice::from_ref(&request)).expect("a valid request").remove(0);
    oracle.check(&request, &output);
    assert!(!was_aborted(&output));
    engine
}
