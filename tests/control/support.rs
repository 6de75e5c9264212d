//! Controllers of tiny engines, sources that wait, and waiting with a bound.

use std::future::Future;
use std::pin::pin;
use std::sync::Arc;
use std::sync::mpsc::{self, Receiver, Sender};
use std::task::{Context, Poll, Wake, Waker};
use std::thread::Thread;
use std::time::{Duration, Instant};

use dormouse::control::{
    ControlError, ControlRequest, ControlResponse, Controller, ControllerOptions, Generation,
    GenerationEvent, GenerationToken, Handle, Operation, Outcome, Payload, Report, SettledReport, SleepPlan,
    SleepWeights, Tags, WhileNotServing,
};
use dormouse::{
    DType, EngineBuilder, FinishReason, InFlight, KvCapacity, LoadOptions, MemoryReport, ModelConfig,
    Request, RequestOutput, SourceError, TensorSpec, UpdateOptions, WeightSource, WeightsDigest,
};

pub(crate) use crate::common::{Owned, Weights, bits, prompt};
use crate::common::{awake, fresh, tiny_builder, tiny_config_json, tiny_weights};

/// Nothing takes longer.
pub(crate) const BOUND: Duration = Duration::from_secs(10);

pub(crate) const EMBEDDING: &str = "model.embed_tokens.weight";
pub(crate) const Q: &str = "model.layers.0.self_attn.q_proj.weight";

pub(crate) fn weights(seed: u64) -> Weights {
    tiny_weights(false, DType::F32, seed)
}

pub(crate) fn builder() -> EngineBuilder {
    tiny_builder(false, DType::F32)
}

/// An awake engine under control.
pub(crate) fn spawn(weights: &Weights) -> Handle {
    Controller::spawn(awake(builder(), weights))
}

pub(crate) fn spawn_with(options: ControllerOptions, weights: &Weights) -> Handle {
    Controller::with(options).drive(awake(builder(), weights))
}

/// Memory of an awake engine, by part.
pub(crate) fn awake_bytes(weights: &Weights) -> MemoryReport {
    awake(builder(), weights).memory()
}

/// The tiny model with a long context, and room for some long requests at once.
pub(crate) fn long_builder() -> EngineBuilder {
    let json = tiny_config_json(false).replace("512", "8192");
    EngineBuilder::from_config(ModelConfig::from_json(&json).unwrap())
        .dtype(DType::F32)
        .kv_cache(KvCapacity::Blocks(2048))
        .block_size(4)
        .threads(1)
}

pub(crate) fn spawn_long(options: ControllerOptions, weights: &Weights) -> Handle {
    Controller::with(options).drive(awake(long_builder(), weights))
}

pub(crate) fn options() -> ControllerOptions {
    ControllerOptions::default()
}

pub(crate) fn queueing() -> ControllerOptions {
    let mut options = ControllerOptions::default();
    options.while_not_serving = WhileNotServing::Queue;
    options
}

pub(crate) fn buffered(tokens: usize) -> ControllerOptions {
    let mut options = ControllerOptions::default();
    options.stream_buffer = tokens;
    options
}

pub(crate) fn request(seed: u32) -> Request {
    Request::new(prompt(21, seed)).max_new_tokens(9).ignore_eos(true).seed(u64::from(seed))
}

/// A request that runs for a second or more: long enough to be met while it runs.
pub(crate) fn endless(seed: u32) -> Request {
    request(seed).max_new_tokens(8000).stream(true)
}

/// What a fresh engine says.
pub(crate) fn expected(weights: &Weights, request: &Request) -> Vec<(Vec<u32>, Vec<u32>)> {
    bits(&fresh(weights, false, &request.clone().stream(false)))
}

pub(crate) fn digest(weights: &Weights) -> WeightsDigest {
    WeightsDigest::of(&mut weights.source()).unwrap()
}

// Waiting.

struct Unpark(Thread);
impl Wake for Unpark {
    fn wake(self: Arc<Self>) {
        self.0.unpark();
    }
}

/// Runs a future to its end; panics if it hangs.
#[track_caller]
pub(crate) fn block_on<F: Future>(future: F) -> F::Output {
    let waker = Waker::from(Arc::new(Unpark(std::thread::current())));
    let (mut future, begin) = (pin!(future), Instant::now());
    loop {
        if let Poll::Ready(output) = future.as_mut().poll(&mut Context::from_waker(&waker)) {
            return output;
        }
        let left = BOUND.checked_sub(begin.elapsed()).expect("it hangs");
        std::thread::park_timeout(left);
    }
}

/// Runs this on a thread of its own; panics if it hangs.
#[track_caller]
pub(crate) fn bounded<T: Send + 'static>(f: impl FnOnce() -> T + Send + 'static) -> T {
    let (sender, receiver) = mpsc::channel();
    std::thread::spawn(move || drop(sender.send(f())));
    receiver.recv_timeout(BOUND).expect("it hangs, or has panicked")
}

/// Waits until it is so; panics if it never is.
#[track_caller]
pub(crate) fn eventually(mut so: impl FnMut() -> bool) {
    let begin = Instant::now();
    while !so() {
        assert!(begin.elapsed() < BOUND, "it never is so");
        std::thread::sleep(Duration::from_micros(200));
    }
}

// Operations.

#[track_caller]
pub(crate) fn run(handle: &Handle, request: impl Into<ControlRequest>) -> ControlResponse {
    block_on(handle.control(request))
}

#[track_caller]
pub(crate) fn done(handle: &Handle, request: impl Into<ControlRequest>) -> ControlResponse {
    let response = run(handle, request);
    assert!(matches!(response.outcome, Ok(Outcome::Done)), "{response:?}");
    response
}

#[track_caller]
pub(crate) fn already(handle: &Handle, request: impl Into<ControlRequest>) -> ControlResponse {
    let response = run(handle, request);
    assert!(matches!(response.outcome, Ok(Outcome::Already)), "{response:?}");
    response
}

#[track_caller]
pub(crate) fn refused(handle: &Handle, request: impl Into<ControlRequest>) -> ControlError {
    let response = run(handle, request);
    response.outcome.expect_err("it is refused")
}

pub(crate) fn sleep(tags: Tags, in_flight: InFlight) -> Operation {
    Operation::Sleep(SleepPlan { tags, weights: SleepWeights::Park, in_flight })
}

pub(crate) fn discard(in_flight: InFlight) -> Operation {
    Operation::Sleep(SleepPlan { tags: Tags::ALL, weights: SleepWeights::Discard, in_flight })
}

pub(crate) fn wake(tags: Tags) -> Operation {
    Operation::WakeUp { tags }
}

pub(crate) fn all_of(weights: &Weights) -> Payload {
    Payload::source(Owned(weights.0.clone()))
}

/// These tensors of a set.
pub(crate) fn some_of(weights: &Weights, names: &[&str]) -> Payload {
    let named = weights.0.iter().filter(|(name, _)| names.contains(&name.as_str()));
    Payload::source(Owned(named.cloned().collect()))
}

/// All tensors but the last.
pub(crate) fn lacking(weights: &Weights) -> Payload {
    Payload::source(Owned(weights.0[..weights.0.len() - 1].to_vec()))
}

pub(crate) fn load(weights: Payload) -> Operation {
    Operation::LoadWeights { weights, options: LoadOptions::default() }
}

pub(crate) fn update(weights: Payload) -> Operation {
    Operation::UpdateWeights { weights, options: UpdateOptions::default() }
}

pub(crate) fn settled(response: &ControlResponse) -> SettledReport {
    let settled = |report: &Report| match report {
        Report::Settled(settled) => Some(settled.clone()),
        Report::Sleep(sleep) => {
            let dormouse::Settled { drained, aborted, retracted } = sleep.settled.clone();
            Some(SettledReport { drained, aborted, retracted, kept: Vec::new() })
        }
        _ => None,
    };
    response.report.iter().find_map(settled).expect("requests were settled")
}

// Requests.

#[track_caller]
pub(crate) fn output(generation: Generation) -> RequestOutput {
    block_on(generation.output()).unwrap()
}

pub(crate) fn ask(handle: &Handle, request: &Request) -> RequestOutput {
    output(handle.submit(request.clone()).unwrap())
}

/// What the controller says is what a fresh engine says.
#[track_caller]
pub(crate) fn assert_serves(handle: &Handle, weights: &Weights, request: &Request) {
    assert_eq!(bits(&ask(handle, request)), expected(weights, request));
}

#[track_caller]
pub(crate) fn next(generation: &mut Generation) -> GenerationEvent {
    let event = block_on(std::future::poll_fn(|context| generation.poll_event(context)));
    event.expect("there is more").unwrap()
}

/// The next tokens of a stream.
#[track_caller]
pub(crate) fn tokens(generation: &mut Generation, count: usize) -> Vec<GenerationToken> {
    let token = |event| match event {
        GenerationEvent::Token(token) => token,
        GenerationEvent::Done(output) => panic!("it has ended: {output:?}"),
    };
    (0..count).map(|_| token(next(generation))).collect()
}

/// The tokens that can be taken without waiting.
#[track_caller]
pub(crate) fn what_is_there(generation: &mut Generation) -> Vec<GenerationToken> {
    let mut read = Vec::new();
    loop {
        let mut context = Context::from_waker(Waker::noop());
        match generation.poll_event(&mut context) {
            Poll::Ready(Some(Ok(GenerationEvent::Token(token)))) => read.push(token),
            Poll::Pending => return read,
            other => panic!("{other:?}"),
        }
    }
}

/// Reads a stream to its end: the tokens so far, those that are left, and the output, which must be the same.
#[track_caller]
pub(crate) fn rest(mut tokens: Vec<GenerationToken>, mut generation: Generation) -> RequestOutput {
    let output = loop {
        match next(&mut generation) {
            GenerationEvent::Token(token) => tokens.push(token),
            GenerationEvent::Done(output) => break output,
        }
    };
    assert!(generation.next_event().is_none(), "the output is the last event");
    for (sample, completion) in output.completions.iter().enumerate() {
        let own: Vec<_> = tokens.iter().filter(|token| token.sample == sample).collect();
        assert!(own.iter().enumerate().all(|(at, token)| token.position == at), "in order, each once");
        let streamed = own.iter().map(|token| (token.token, token.logprob.to_bits()));
        let whole = completion.tokens.iter().copied().zip(completion.logprobs.iter().map(|l| l.to_bits()));
        assert_eq!(streamed.collect::<Vec<_>>(), whole.collect::<Vec<_>>(), "the stream is the output");
    }
    output
}

pub(crate) fn was_aborted(output: &RequestOutput) -> bool {
    output.completions.iter().all(|completion| completion.finish_reason == FinishReason::Abort)
}

pub(crate) fn ended_by_itself(output: &RequestOutput) -> bool {
    output.completions.iter().all(|completion| completion.finish_reason == FinishReason::Length)
}

/// Every sample is the beginning of what a fresh engine says.
#[track_caller]
pub(crate) fn assert_begins(output: &RequestOutput, whole: &[(Vec<u32>, Vec<u32>)]) {
    assert_eq!(output.completions.len(), whole.len());
    for ((tokens, logprobs), (all_tokens, all_logprobs)) in bits(output).iter().zip(whole) {
        assert!(all_tokens.starts_with(tokens) && all_logprobs.starts_with(logprobs));
        assert_eq!(tokens.len(), logprobs.len());
    }
}

/// Nothing is in flight and nothing was lost: counters add up, no sequence runs, no block is held.
#[track_caller]
pub(crate) fn assert_idle(handle: &Handle) {
    let (metrics, status) = (handle.metrics(), handle.status());
    assert_eq!((metrics.live_requests, metrics.requests_aside, metrics.control_queue), (0, 0, 0));
    assert_eq!(metrics.accepted, metrics.finished + metrics.aborted + metrics.failed, "{metrics:?}");
    let engine = status.engine;
    assert_eq!((engine.live_requests, engine.running, engine.waiting, engine.blocks_owned), (0, 0, 0, 0));
    assert_eq!(engine.blocks, engine.blocks_free + engine.blocks_cached);
    assert_eq!((status.busy, status.live_requests), (None, 0));
}

// Sources that wait.

/// A source that waits at one of its reads until it is let on.
struct Gated {
    inner: Owned,
    reads: usize,
    entered: Sender<()>,
    on: Receiver<()>,
}

/// The other side of a source that waits. Dropping it lets the source on.
pub(crate) struct Gate {
    entered: Receiver<()>,
    on: Sender<()>,
}

impl Gate {
    /// Waits until the source waits.
    #[track_caller]
    pub(crate) fn reached(&self) {
        self.entered.recv_timeout(BOUND).expect("the source is read");
    }

    pub(crate) fn open(self) {
        drop(self.on);
    }
}

/// Weights that stop before their third tensor.
pub(crate) fn gated(weights: &Weights) -> (Payload, Gate) {
    let ((entered, seen), (go, on)) = (mpsc::channel(), mpsc::channel());
    let inner = Owned(weights.0.clone());
    (Payload::source(Gated { inner, reads: 0, entered, on }), Gate { entered: seen, on: go })
}

impl WeightSource for Gated {
    fn index(&mut self) -> Result<Vec<TensorSpec>, SourceError> {
        self.inner.index()
    }

    fn read(&mut self, tensor: usize, sink: &mut dyn FnMut(&[u8])) -> Result<(), SourceError> {
        self.reads += 1;
        if self.reads == 3 {
            // Both fail when the other side is gone.
            let _ = self.entered.send(());
            let _ = self.on.recv();
        }
        self.inner.read(tensor, sink)
    }
}
