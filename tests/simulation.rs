//! Random lives of an engine with tiny pools: whatever happens, each output is the bits that a fresh engine
//! gives, every request ends exactly once, and no block is lost.

mod common;
#[path = "common/exact.rs"]
mod exact;

use std::cell::RefCell;
use std::collections::{BTreeMap, HashMap};
use std::rc::Rc;
use std::time::Duration;

use crate::common::{Weights, awake, cut, prompt, tiny_builder, tiny_weights};
use dormouse::{
    Awake, Completion, DType, Engine, FinishReason, GenerateError, InFlight, KvCapacity, OnDeadline, Request,
    RequestError, RequestId, RequestOutput, SleepOptions, StepToken, WeightVersion,
};
use proptest::prelude::*;

const WEIGHT_SETS: usize = 4;

/// One engine for each set of weights: a big pool, no prefix cache, one request at a time.
struct Oracle {
    weights: Vec<Weights>,
    engines: Vec<Engine<Awake>>,
    known: RefCell<HashMap<String, RequestOutput>>,
}

impl Oracle {
    fn new() -> Self {
        let weights: Vec<Weights> = (0..WEIGHT_SETS).map(|seed| set(seed as u64)).collect();
        let engine = |w| awake(tiny_builder(true, DType::F32).prefix_cache(false), w);
        Self { engines: weights.iter().map(engine).collect(), weights, known: RefCell::default() }
    }

    /// What an engine with these weights says to this request.
    fn answer(&self, weights: usize, request: &Request) -> RequestOutput {
        let key = format!("{weights} {request:?}");
        if let Some(known) = self.known.borrow().get(&key) {
            return known.clone();
        }
        let output = self.engines[weights].generate(std::slice::from_ref(request));
        let output = output.expect("the simulated engine took it").remove(0);
        self.known.borrow_mut().insert(key, output.clone());
        output
    }
}

fn set(seed: u64) -> Weights {
    tiny_weights(true, DType::F32, seed)
}

thread_local! {
    static ORACLE: Rc<Oracle> = Rc::new(Oracle::new());
}

/// What to ask for; lengths are cut to what the pool can hold.
#[derive(Debug, Clone)]
struct Ask {
    prompt: Vec<u32>,
    samples: usize,
    new_tokens: usize,
    seed: u64,
    kind: u8,
}

impl Ask {
    fn request(&self, max_len: usize) -> Request {
        let prompt = &self.prompt[..self.prompt.len().min(max_len - 1)];
        let new_tokens = self.new_tokens.min(max_len - prompt.len());
        let request = Request::new(prompt).samples(self.samples).max_new_tokens(new_tokens).seed(self.seed);
        let request = request.stream(self.seed.is_multiple_of(2));
        match self.kind {
            0 => request,
            1 => request.temperature(0.0).ignore_eos(true),
            2 => request.top_k(3).top_p(0.9).processed_logprobs(true).return_kept_set(true),
            3 => request.prompt_logprobs(true).top_logprobs(2).ignore_eos(true),
            4 => request.prompt_logprobs(true).max_new_tokens(0),
            5 => request.repetition_penalty(1.4).frequency_penalty(0.3).ignore_eos(true),
            6 => request.stop_token_ids((1..16).collect::<Vec<_>>()).min_new_tokens(new_tokens.min(2)),
            _ => request.cache_salt("tenant").ignore_eos(true),
        }
    }
}

#[derive(Debug, Clone)]
enum Op {
    Submit(Ask),
    /// Submits an aborted output again.
    Resume(usize),
    Step(usize),
    Abort(usize),
    AbortAll,
    Generate(Vec<Ask>),
    Score(Vec<Vec<u32>>),
    /// Turns of two sessions in turn.
    Sessions(Vec<Ask>),
    ClearPrefixCache,
    Sleep(Nap),
}

/// A sleep, and how the engine wakes from it.
#[derive(Debug, Clone)]
struct Nap {
    resident: bool,
    in_flight: InFlight,
    then: Then,
    take_settled: bool,
}

#[derive(Debug, Clone, Copy)]
enum Then {
    Restore,
    Load(usize),
    DiscardAndLoad(usize),
}

fn ask() -> impl Strategy<Value = Ask> {
    let tokens = prop::collection::vec(1..3u32, 1..14);
    (tokens, 1..4usize, 1..14usize, 0..4u64, 0..8u8)
        .prop_map(|(prompt, samples, new_tokens, seed, kind)| Ask { prompt, samples, new_tokens, seed, kind })
}

fn nap() -> impl Strategy<Value = Nap> {
    let on_deadline =
        prop_oneof![Just(OnDeadline::Refuse), Just(OnDeadline::Abort), Just(OnDeadline::Retract)];
    let drain = (any::<bool>(), on_deadline).prop_map(|(enough, then)| InFlight::Drain {
        deadline: if enough { Duration::from_secs(60) } else { Duration::ZERO },
        then,
    });
    let in_flight = prop_oneof![
        1 => Just(InFlight::Refuse),
        1 => Just(InFlight::Abort),
        1 => drain,
        3 => Just(InFlight::Retract),
    ];
    let then = prop_oneof![
        Just(Then::Restore),
        (0..WEIGHT_SETS).prop_map(Then::Load),
        (0..WEIGHT_SETS).prop_map(Then::DiscardAndLoad),
    ];
    (any::<bool>(), in_flight, then, any::<bool>())
        .prop_map(|(resident, in_flight, then, take_settled)| Nap { resident, in_flight, then, take_settled })
}

fn op() -> impl Strategy<Value = Op> {
    let tokens = prop::collection::vec(1..3u32, 1..14);
    prop_oneof![
        8 => ask().prop_map(Op::Submit),
        2 => any::<usize>().prop_map(Op::Resume),
        8 => (1..6usize).prop_map(Op::Step),
        2 => any::<usize>().prop_map(Op::Abort),
        1 => Just(Op::AbortAll),
        2 => prop::collection::vec(ask(), 1..4).prop_map(Op::Generate),
        1 => prop::collection::vec(tokens, 1..3).prop_map(Op::Score),
        2 => prop::collection::vec(ask(), 1..6).prop_map(Op::Sessions),
        1 => Just(Op::ClearPrefixCache),
        3 => nap().prop_map(Op::Sleep),
    ]
}

#[derive(Debug, Clone)]
struct Pool {
    blocks: usize,
    block_size: usize,
    max_num_seqs: usize,
    rows: usize,
    cached_blocks: Option<usize>,
}

fn pool() -> impl Strategy<Value = Pool> {
    let cached_blocks = prop::option::of(0..4usize);
    (4..13usize, 1..5usize, 1..6usize, 1..20usize, cached_blocks).prop_map(
        |(blocks, block_size, max_num_seqs, rows, cached_blocks)| Pool {
            blocks,
            block_size,
            max_num_seqs,
            rows,
            cached_blocks,
        },
    )
}

/// A request that was submitted and has not been handed out.
struct Live {
    request: Request,
    /// Whether an earlier run had made some of it.
    resumed: bool,
    /// Sets of weights that served while it was there.
    under: Vec<usize>,
    /// Tokens that steps handed out, by sample.
    streamed: BTreeMap<usize, Vec<StepToken>>,
}

impl Live {
    /// Steps handed out each token once, in order, and, if the output came from a step, all of them.
    fn check_stream(&self, output: &RequestOutput, from_step: bool) {
        for completion in &output.completions {
            let streamed = self.streamed.get(&completion.index).map_or(&[][..], Vec::as_slice);
            for (token, next) in streamed.iter().zip(&streamed[1.min(streamed.len())..]) {
                assert_eq!(token.position + 1, next.position, "in order, without gaps");
            }
            for token in streamed {
                let expected = (completion.tokens[token.position], completion.logprobs[token.position]);
                assert_eq!((token.token, token.logprob.to_bits()), (expected.0, expected.1.to_bits()));
                let top = completion.top_logprobs.as_ref().map(|top| &top[token.position]);
                let top = top.map_or(&[][..], Vec::as_slice);
                assert_eq!(exact::top_to_bits(&token.top), exact::top_to_bits(top));
                assert_eq!(token.top.len(), self.request.params.top_logprobs);
            }
            // What an earlier run had made is not handed out again.
            let made: usize = streamed.first().map_or(completion.tokens.len(), |first| first.position);
            let whole = made + streamed.len() == completion.tokens.len() && (made == 0 || self.resumed);
            assert!(!from_step || !self.request.stream || whole, "{streamed:?} of {completion:?}");
            assert!(self.request.stream || streamed.is_empty(), "nobody asked for {streamed:?}");
        }
    }
}

struct Simulation {
    oracle: Rc<Oracle>,
    /// Taken while it sleeps.
    engine: Option<Engine<Awake>>,
    weights: usize,
    /// Which set of weights each version was.
    versions: Vec<(WeightVersion, usize)>,
    live: BTreeMap<RequestId, Live>,
    /// Aborted ones, to be resumed.
    partials: Vec<(Request, RequestOutput)>,
    max_len: usize,
    blocks: usize,
}

impl Simulation {
    fn new(pool: &Pool) -> Self {
        let oracle = ORACLE.with(Rc::clone);
        let mut builder = tiny_builder(true, DType::F32)
            .kv_cache(KvCapacity::Blocks(pool.blocks))
            .block_size(pool.block_size)
            .max_num_seqs(pool.max_num_seqs)
            .max_num_batched_tokens(pool.rows);
        if let Some(blocks) = pool.cached_blocks {
            builder = builder.prefix_cache_blocks(blocks);
        }
        let engine = awake(builder, &oracle.weights[0]);
        Self {
            max_len: engine.limits().max_model_len,
            versions: vec![(engine.version(), 0)],
            engine: Some(engine),
            oracle,
            weights: 0,
            live: BTreeMap::new(),
            partials: Vec::new(),
            blocks: pool.blocks,
        }
    }

    fn engine(&self) -> &Engine<Awake> {
        self.engine.as_ref().expect("awake between operations")
    }

    fn run(&mut self, op: &Op) {
        match op {
            Op::Submit(ask) => self.submit(ask.request(self.max_len), false),
            Op::Resume(which) => {
                if !self.partials.is_empty() {
                    let (request, partial) = self.partials.swap_remove(which % self.partials.len());
                    self.submit(request.resume(&partial).expect("its own output"), true);
                }
            }
            Op::Step(count) => (0..*count).for_each(|_| self.step()),
            Op::Abort(which) => {
                let id = self.live.keys().copied().nth(which % self.live.len().max(1));
                let ids: Vec<RequestId> = id.into_iter().collect();
                let aborted = self.engine().abort(&ids);
                assert!(aborted.aborted.iter().all(|id| ids.contains(id)), "only what was named");
                self.take(aborted.outputs, false);
                assert!(ids.iter().all(|id| !self.live.contains_key(id)), "aborted now or ended before");
            }
            Op::AbortAll => {
                let aborted = self.engine().abort_all();
                self.take(aborted.outputs, false);
                assert!(self.live.is_empty(), "all are handed out");
                assert_eq!(self.engine().stats().blocks_owned, 0, "nobody owns a block");
            }
            Op::Generate(asks) => {
                let requests: Vec<Request> = asks.iter().map(|ask| ask.request(self.max_len)).collect();
                let outputs = self.engine().generate(&requests).expect("valid requests");
                for (request, output) in requests.iter().zip(&outputs) {
                    self.check_whole(request, output);
                }
            }
            Op::Score(sequences) => {
                let cut = |tokens: &Vec<u32>| tokens[..tokens.len().min(self.max_len)].to_vec();
                let sequences: Vec<Vec<u32>> = sequences.iter().map(cut).collect();
                let scores = self.engine().score(&sequences).expect("valid sequences");
                for (sequence, scores) in sequences.into_iter().zip(scores) {
                    let request = Request::new(sequence).max_new_tokens(0).prompt_logprobs(true);
                    let expected = self.oracle.answer(self.weights, &request).prompt_logprobs;
                    assert_eq!(Some(exact::to_bits(&scores)), expected.as_deref().map(exact::to_bits));
                }
            }
            Op::Sessions(turns) => self.sessions(turns),
            Op::ClearPrefixCache => {
                self.engine().clear_prefix_cache();
                assert_eq!(self.engine().stats().blocks_cached, 0, "nothing is cached");
            }
            Op::Sleep(nap) => self.sleep(nap),
        }
        let stats = self.engine().stats();
        assert_eq!(stats.blocks, self.blocks);
        assert_eq!(stats.blocks_free + stats.blocks_cached + stats.blocks_owned, self.blocks, "{stats:?}");
        assert!(stats.live_requests <= self.live.len(), "{stats:?}");
    }

    fn submit(&mut self, request: Request, resumed: bool) {
        let id = self.engine().submit(request.clone()).expect("a valid request");
        let live = Live { request, resumed, under: vec![self.weights], streamed: BTreeMap::new() };
        assert!(self.live.insert(id, live).is_none(), "ids are used once");
    }

    fn step(&mut self) {
        let step = self.engine().step().expect("the device works");
        self.take_step(step.tokens, step.outputs);
        assert_eq!(step.live_requests, self.live.len(), "a step hands out all that have ended");
    }

    fn take_step(&mut self, tokens: Vec<StepToken>, outputs: Vec<RequestOutput>) {
        for token in tokens {
            let live = self.live.get_mut(&token.request).expect("tokens come before or with the output");
            live.streamed.entry(token.sample).or_default().push(token);
        }
        self.take(outputs, true);
    }

    /// Takes outputs of submitted requests.
    fn take(&mut self, outputs: Vec<RequestOutput>, from_step: bool) {
        for output in outputs {
            let live = self.live.remove(&output.request).expect("submitted, and not handed out before");
            live.check_stream(&output, from_step);
            self.check_spans(&live, &output);
            if output.completions.iter().any(|c| c.finish_reason == FinishReason::Abort) {
                self.partials.push((live.request, output));
            }
        }
    }

    /// An output that one set of weights made.
    fn check_whole(&self, request: &Request, output: &RequestOutput) {
        let expected = self.oracle.answer(self.weights, request);
        assert_eq!(output.prompt, request.prompt);
        assert_eq!(exact::output(output), exact::output(&expected), "{request:?}");
        let cached = output.completions[0].cached_tokens;
        assert!(cached < request.prompt.len(), "the last token is always computed");
    }

    /// An output that several sets may have made: each span is what its weights continue with.
    fn check_spans(&self, live: &Live, output: &RequestOutput) {
        assert_eq!(output.prompt, live.request.prompt);
        assert_eq!(output.completions.len(), live.request.params.samples);
        let mut last: Option<(u64, usize)> = None;
        for completion in &output.completions {
            let mut covered = 0;
            for span in &completion.versions {
                assert_eq!(span.tokens.start, covered, "no gaps");
                covered = span.tokens.end;
                let known = self.versions.iter().find(|(version, _)| *version == span.version);
                let &(_, weights) = known.expect("a version that served");
                last = last.max(Some((span.version.counter, weights)));
                let ends = covered == completion.tokens.len();
                self.check_span(&live.request, completion, span.tokens.clone(), weights, ends);
            }
            assert_eq!(covered, completion.tokens.len(), "all tokens");
            if let FinishReason::Error(error) = &completion.finish_reason {
                panic!("nothing is wrong with the request: {error}");
            }
        }
        self.check_prompt_logprobs(live, output, last.map(|(_, weights)| weights));
    }

    fn check_span(
        &self,
        request: &Request,
        completion: &Completion,
        tokens: std::ops::Range<usize>,
        weights: usize,
        ends: bool,
    ) {
        // The others of its group start anew in the oracle: they don't matter.
        let whole = Request::new(request.prompt.clone()).params(request.params.clone());
        let continued = if tokens.start == 0 {
            self.oracle.answer(weights, &whole)
        } else {
            let before = RequestOutput {
                request: self.oracle.answer(weights, &whole).request,
                id: None,
                prompt: request.prompt.clone(),
                prompt_logprobs: None,
                completions: vec![cut(completion, tokens.start)],
            };
            self.oracle.answer(weights, &whole.resume(&before).expect("the same prompt"))
        };
        let expected = &continued.completions[completion.index];
        assert!(expected.tokens.len() >= tokens.end, "{expected:?} for {completion:?}");
        let (mut got, mut wanted) =
            (exact::completion(&cut(completion, tokens.end)), exact::completion(&cut(expected, tokens.end)));
        let stopped = matches!(completion.finish_reason, FinishReason::Stop { .. } | FinishReason::Length);
        if ends && stopped {
            got = exact::completion(completion);
            wanted = exact::completion(expected);
        }
        assert_eq!(got, wanted, "tokens {tokens:?} of {request:?}");
    }

    /// All of one set of weights; complete, and of the last set, if the request ended by itself.
    fn check_prompt_logprobs(&self, live: &Live, output: &RequestOutput, last: Option<usize>) {
        assert_eq!(output.prompt_logprobs.is_some(), live.request.params.prompt_logprobs);
        let Some(logprobs) = output.prompt_logprobs.as_deref().map(exact::to_bits) else { return };
        let score = Request::new(output.prompt.clone()).max_new_tokens(0).prompt_logprobs(true);
        let expected = |weights: usize| {
            let answer = self.oracle.answer(weights, &score);
            exact::to_bits(&answer.prompt_logprobs.expect("asked for"))
        };
        let by_itself = output
            .completions
            .iter()
            .all(|c| matches!(c.finish_reason, FinishReason::Stop { .. } | FinishReason::Length));
        match last.filter(|_| by_itself) {
            Some(weights) => assert_eq!(logprobs, expected(weights)),
            None => assert!(
                live.under.iter().any(|&weights| {
                    let expected = expected(weights);
                    if by_itself { expected == logprobs } else { expected.starts_with(&logprobs) }
                }),
                "{logprobs:?} are of none of {:?}",
                live.under
            ),
        }
    }

    fn sessions(&mut self, turns: &[Ask]) {
        let engine = self.engine.as_ref().expect("awake between operations");
        let mut sessions = [engine.session(), engine.session()];
        for (i, turn) in turns.iter().enumerate() {
            let session = &mut sessions[i % 2];
            let before = session.tokens().to_vec();
            let turn = Ask { samples: 1, ..turn.clone() }.request(self.max_len);
            match session.generate(&turn) {
                Ok(output) => {
                    let prompt = [before.as_slice(), &turn.prompt].concat();
                    assert_eq!(output.prompt, prompt);
                    let completion = &output.completions[0];
                    assert_eq!(session.tokens(), [prompt.as_slice(), &completion.tokens].concat());
                    self.check_session_turn(&Request::new(prompt).params(turn.params.clone()), &output);
                }
                Err(GenerateError::Request { source: RequestError::TooLong { .. }, .. }) => {
                    assert!(before.len() + turn.prompt.len() + turn.params.max_new_tokens > self.max_len);
                    assert_eq!(session.tokens(), before, "a refused turn didn't happen");
                }
                Err(error) => panic!("{error}"),
            }
        }
    }

    fn check_session_turn(&self, request: &Request, output: &RequestOutput) {
        assert_eq!(exact::output(output), exact::output(&self.oracle.answer(self.weights, request)));
    }

    fn sleep(&mut self, nap: &Nap) {
        let engine = self.engine.take().expect("awake between operations");
        let mut options = SleepOptions::default().in_flight(nap.in_flight);
        if nap.resident {
            options = options.resident();
        }
        let weights = match nap.then {
            Then::Restore => self.weights,
            Then::Load(weights) | Then::DiscardAndLoad(weights) => weights,
        };
        let source = self.oracle.weights[weights].source();
        let mut settled = Vec::new();
        let slept = match nap.then {
            Then::DiscardAndLoad(_) => engine.sleep_discarding(options).map(|mut asleep| {
                if nap.take_settled {
                    settled = asleep.take_settled();
                }
                asleep.load_weights(source).expect("complete weights")
            }),
            Then::Load(_) | Then::Restore => engine.sleep(options).map(|mut asleep| {
                if nap.take_settled {
                    settled = asleep.take_settled();
                }
                match nap.then {
                    Then::Restore => asleep.restore_weights().expect("memory"),
                    _ => asleep.load_weights(source).expect("complete weights"),
                }
            }),
        };
        let loaded = match slept {
            Ok(loaded) => loaded,
            Err(refused) => {
                let may_refuse = matches!(
                    nap.in_flight,
                    InFlight::Refuse | InFlight::Drain { then: OnDeadline::Refuse, .. }
                );
                assert!(may_refuse && !self.live.is_empty(), "{}", refused.error);
                self.engine = Some(refused.into_parts().0);
                return;
            }
        };
        let engine = loaded.wake_up().expect("memory");
        let stats = engine.stats();
        assert_eq!(stats.blocks_free, stats.blocks, "an empty cache");
        self.versions.push((engine.version(), weights));
        self.engine = Some(engine);
        self.take(settled, false);
        self.weights = weights;
        self.live.values_mut().for_each(|live| live.under.push(weights));
    }

    /// Everything ends, once, and nothing stays owned.
    fn finish(mut self) {
        let mut steps = 0;
        loop {
            let step = self.engine().step().expect("the device works");
            let idle = step.is_idle();
            self.take_step(step.tokens, step.outputs);
            if idle {
                break;
            }
            steps += 1;
            assert!(steps < 20_000, "no progress: {:?}", self.engine().stats());
        }
        assert!(self.live.is_empty(), "{:?} never ended", self.live.keys());
        let stats = self.engine().stats();
        assert_eq!((stats.blocks_owned, stats.running, stats.waiting), (0, 0, 0), "{stats:?}");
    }
}

fn lives() -> ProptestConfig {
    ProptestConfig { cases: crate::common::cases(1000), max_shrink_iters: 2000, ..ProptestConfig::default() }
}

proptest! {
    #![proptest_config(lives())]

    #[test]
    fn outputs_are_those_of_a_fresh_engine(pool in pool(), ops in prop::collection::vec(op(), 1..50)) {
        let mut simulation = Simulation::new(&pool);
        ops.iter().for_each(|op| simulation.run(op));
        simulation.finish();
    }
}

/// What the oracle rests on: an engine that has served gives what one gives that was just built.
#[test]
fn the_oracle_is_a_new_engine() {
    let oracle = ORACLE.with(Rc::clone);
    for kind in 0..8 {
        for weights in 0..WEIGHT_SETS {
            let ask = Ask { prompt: prompt(9, 2), samples: 2, new_tokens: 9, seed: 4, kind };
            let request = ask.request(64);
            oracle.answer(weights, &Request::new(prompt(30, 5)).max_new_tokens(20));
            let fresh = crate::common::fresh(&set(weights as u64), true, &request);
            assert_eq!(exact::output(&oracle.answer(weights, &request)), exact::output(&fresh));
        }
    }
    let request = Request::new(prompt(9, 2)).temperature(0.0).ignore_eos(true);
    let greedy =
        (0..WEIGHT_SETS).map(|weights| oracle.answer(weights, &request).completions[0].tokens.clone());
    assert_eq!(
        greedy.collect::<std::collections::BTreeSet<_>>().len(),
        WEIGHT_SETS,
        "sets can be told apart"
    );
}

/// A turn under another cache salt cannot go on from the pinned blocks: it lets them go and is answered.
#[test]
fn a_session_may_change_its_salt() {
    let oracle = ORACLE.with(Rc::clone);
    let engine = awake(tiny_builder(true, DType::F32).prefix_cache(false), &oracle.weights[0]);
    let mut session = engine.session();
    let turn = |salt: &str| Request::new(vec![1, 2, 3]).seed(1).ignore_eos(true).cache_salt(salt);
    for salt in ["a", "b", "b", "a"] {
        let output = session.generate(&turn(salt)).unwrap();
        let alone = turn(salt);
        let request = Request::new(output.prompt.clone()).params(alone.params.clone());
        assert_eq!(exact::output(&output), exact::output(&oracle.answer(0, &request)), "salt {salt}");
    }
    drop(session);
    engine.step().unwrap();
    assert_eq!(engine.stats().blocks_free, engine.stats().blocks, "nothing stays pinned");
}
