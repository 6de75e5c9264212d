//! C26, B53, B56, B62: ten thousand short requests, many of them dropped, over two hundred cycles of sleep, update
//! and wake: nothing grows, nothing is lost. `DORMOUSE_SOAK_REQUESTS` scales it.
#![allow(clippy::unwrap_used, reason = "a test that fails says where")]

mod common;
#[path = "common/dice.rs"]
mod dice;
#[path = "common/exact.rs"]
mod exact;
#[path = "common/oracle.rs"]
mod oracle;
#[path = "common/process.rs"]
mod process;
#[path = "common/watch.rs"]
mod watch;

use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::thread;
use std::time::{Duration, Instant};

use dormouse::control::{
    AbortTarget, ControlRequest, Controller, ControllerOptions, Generation, GenerationEvent, Handle,
    Lifecycle, Metrics, Operation, PauseDeadline, PauseMode, Payload, Reload, SleepPlan, SleepWeights, Tags,
    WhileNotServing,
};
use dormouse::{DType, InFlight, LoadOptions, OnDeadline, RequestOutput, UpdateOptions};

use dice::Dice;
use oracle::{Mix, Oracle, REQUESTS, SETS, request, was_aborted};
use process::{handles, resident};
use watch::{Ends, Watch};

const MIB: i64 = 1 << 20;
const CLIENTS: usize = 6;
const CYCLES: usize = 200;
/// Cycles before the first measurement.
const WARM_UP: usize = 60;

struct Soak {
    handle: Handle,
    oracle: &'static Oracle,
    watch: Arc<Watch>,
    /// Requests that may be submitted by now.
    allowed: AtomicUsize,
    begun: AtomicUsize,
    /// Requests whose client is done with them.
    done: AtomicUsize,
    dropped: AtomicU64,
    finished: AtomicU64,
    aborted: AtomicU64,
    /// No more requests come.
    over: AtomicBool,
    /// Nothing but their clients ends requests.
    gentle: AtomicBool,
    failed: AtomicBool,
    /// Of the weights that were sent, in order.
    sent: Mutex<Vec<Mix>>,
}

impl Soak {
    fn client(&self, seed: u64) {
        let mut dice = Dice::new(seed);
        let mut name = format!("client {seed}");
        loop {
            let number = self.begun.fetch_add(1, Ordering::SeqCst);
            while number >= self.allowed.load(Ordering::SeqCst) {
                if self.over.load(Ordering::SeqCst) {
                    return;
                }
                thread::sleep(Duration::from_micros(200));
            }
            let _waiting = self.watch.begin(format!("request {number}"));
            if !self.one(&mut dice, &name) {
                // It may still be on its way out.
                name = format!("{number}");
            }
            self.done.fetch_add(1, Ordering::SeqCst);
        }
    }

    /// One request: read to its end, or dropped at some stage. Returns whether its name is free again.
    fn one(&self, dice: &mut Dice, name: &str) -> bool {
        let gentle = self.gentle.load(Ordering::SeqCst);
        let mut request = request(dice.below(REQUESTS)).stream(dice.one_in(2));
        request.id = dice.one_in(2).then(|| name.to_owned());
        let generation = self.handle.submit(request.clone()).expect("it serves or queues");
        let fate = dice.below(10);
        if fate < 4 {
            self.read_some(dice, fate, generation);
            self.dropped.fetch_add(1, Ordering::SeqCst);
            return false;
        }
        if fate == 4 {
            let (mut requests, mut names) = (vec![generation.id()], vec![]);
            if let Some(name) = &request.id {
                (requests, names) = (vec![], vec![name.clone()]);
            }
            self.handle.abort(AbortTarget::These { requests, names });
        }
        let output = generation.wait().expect("the engine works");
        if gentle && self.gentle.load(Ordering::SeqCst) && fate != 4 {
            assert!(!was_aborted(&output), "nobody ended {output:?}");
        }
        self.ended(&request, &output);
        true
    }

    fn read_some(&self, dice: &mut Dice, fate: usize, mut generation: Generation) {
        match fate {
            0 => {}
            1 => thread::sleep(Duration::from_micros(dice.next() % 3000)),
            _ => {
                // Up to its last token, of which there may be none before the output.
                let tokens = dice.below(16);
                let over = |event| !matches!(event, Ok(GenerationEvent::Token(_)));
                generation.events().take(tokens).any(over);
            }
        }
    }

    fn ended(&self, request: &dormouse::Request, output: &RequestOutput) {
        let counter = if was_aborted(output) { &self.aborted } else { &self.finished };
        counter.fetch_add(1, Ordering::SeqCst);
        self.oracle.check(request, output);
        let spans = output.completions.iter().flat_map(|completion| &completion.versions);
        let sent = self.sent.lock().unwrap();
        for span in spans {
            let mix = self.oracle.mix(&span.version.digest);
            assert_eq!(mix, sent.get(span.version.counter as usize - 1).copied(), "{}", span.version);
        }
    }

    fn run(&self, operation: Operation) {
        let said = format!("{operation:?}");
        let _waiting = self.watch.begin(said.clone());
        // Always the same name: it is free once the one before is answered.
        let response = self.handle.control(ControlRequest::new(operation).id("cycle")).wait();
        response.outcome.unwrap_or_else(|error| panic!("{said}: {error}"));
    }

    /// One cycle of each kind of pause, sleep and update in turn.
    fn cycle(&self, number: usize) {
        let handle = &self.handle;
        self.pause(number);
        let in_flight = self.sleep(number);
        if number % 7 == 3 {
            // A failure on the way changes nothing.
            let weights = Payload::Bucket(vec![1; 40]);
            let options = LoadOptions::default();
            handle.run(Operation::LoadWeights { weights, options }).unwrap_err();
        }
        self.update(number);
        if handle.state().paused {
            self.run(Operation::Resume);
        }
        self.run(Operation::WakeUp { tags: Tags::ALL });
        assert!(handle.state().admitting, "cycle {number}, {in_flight:?}");
    }

    fn pause(&self, number: usize) {
        let wait = PauseMode::Wait { on_deadline: PauseDeadline::Undo };
        match number % 5 {
            0 => {
                self.run(Operation::Pause(PauseMode::Keep));
                let steps = self.handle.metrics().engine.steps;
                thread::sleep(Duration::from_millis(1));
                assert_eq!(self.handle.metrics().engine.steps, steps, "no step while it is paused");
            }
            1 if is_gentle(number) => {}
            1 => self.run(Operation::Pause(PauseMode::Abort)),
            2 => {
                self.run(Operation::Pause(wait));
                self.run(Operation::Resume);
            }
            _ => {}
        }
    }

    fn sleep(&self, number: usize) -> InFlight {
        let deadline = Duration::from_millis(2);
        let in_flight = match number % 4 {
            0 | 1 => InFlight::Retract,
            2 if !is_gentle(number) => InFlight::Abort,
            _ if self.handle.state().paused => InFlight::Retract,
            _ => InFlight::Drain { deadline, then: OnDeadline::Retract },
        };
        let (tags, weights) = match number % 6 {
            0 | 1 => (Tags::ALL, SleepWeights::Park),
            2 | 3 => (Tags::ALL, SleepWeights::Discard),
            _ => (Tags::KV_CACHE, SleepWeights::Park),
        };
        match number % 12 {
            11 if !is_gentle(number) => self.run(Operation::ClearLoadWeight),
            _ => self.run(Operation::Sleep(SleepPlan { tags, weights, in_flight })),
        }
        in_flight
    }

    /// New weights, in each of the ways that the state allows.
    fn update(&self, number: usize) {
        let (set, other) = (number % SETS, (number + 1) % SETS);
        let source = |set| Payload::source(self.oracle.whole(set));
        match number % 5 {
            0 => {
                let options = LoadOptions::default();
                self.send(Mix::of(set), Operation::LoadWeights { weights: source(set), options });
            }
            1 => {
                let weights = Some(Payload::Bucket(self.oracle.whole(set).bucket()));
                let options = LoadOptions::default();
                self.send(Mix::of(set), Operation::UpdateModelWeight { weights, options });
                self.run(Operation::Sleep(SleepPlan {
                    tags: Tags::KV_CACHE,
                    in_flight: InFlight::Retract,
                    ..SleepPlan::default()
                }));
            }
            2 => self.transact(set),
            _ => {
                self.run(Operation::WakeUp { tags: Tags::WEIGHTS });
                let options = UpdateOptions::default();
                self.send(Mix::of(set), Operation::UpdateWeights { weights: source(set), options });
                let partial = UpdateOptions::default().partial([self.oracle.name_of_one()]).in_place();
                let weights = Payload::source(self.oracle.one(other));
                let update = Operation::UpdateWeights { weights, options: partial };
                self.send(Mix { base: set, one: other }, update);
                // What is torn is mended.
                let weights = Payload::source(self.oracle.part(other, 0..self.oracle.tensors() - 1));
                let options = UpdateOptions::default().in_place();
                self.handle.run(Operation::UpdateWeights { weights, options }).unwrap_err();
                let options = UpdateOptions::default().in_place();
                self.send(Mix::of(other), Operation::UpdateWeights { weights: source(other), options });
            }
        }
    }

    fn send(&self, mix: Mix, operation: Operation) {
        // Before a request can say it.
        self.sent.lock().unwrap().push(mix);
        self.run(operation);
    }

    /// Weights in two pushes, after a transaction that is abandoned.
    fn transact(&self, set: usize) {
        self.run(Operation::WakeUp { tags: Tags::WEIGHTS });
        let begin = || {
            let begin = Operation::Begin { options: UpdateOptions::default(), idle: None };
            let begun = self.handle.run(begin).expect("the weights are awake or awaited");
            begun.state_after.transaction.expect("one is open")
        };
        let middle = self.oracle.tensors() / 2;
        let push = |transaction, tensors| {
            let weights = Payload::source(self.oracle.part(set, tensors));
            self.run(Operation::Push { transaction, weights });
        };
        let abandoned = begin();
        push(abandoned, 0..middle);
        self.run(Operation::Abandon { transaction: abandoned });
        let transaction = begin();
        push(transaction, middle..self.oracle.tensors());
        push(transaction, 0..middle);
        self.send(Mix::of(set), Operation::Commit { transaction });
    }

    /// Lets the clients submit up to here, and waits until they have, or all are done.
    fn allow(&self, requests: usize, all_done: bool) {
        self.allowed.store(requests, Ordering::SeqCst);
        let begin = Instant::now();
        let counter = if all_done { &self.done } else { &self.begun };
        let enough = || {
            let idle = !all_done || self.handle.status().live_requests == 0;
            counter.load(Ordering::SeqCst) >= requests && idle
        };
        while !enough() {
            assert!(begin.elapsed() < Duration::from_secs(20), "{:#?}", self.handle.status());
            assert!(!self.failed.load(Ordering::SeqCst), "a client failed");
            thread::sleep(Duration::from_micros(200));
        }
    }

    /// What the process has when nothing is on its way.
    fn measure(&self) -> (i64, [usize; 3]) {
        thread::sleep(Duration::from_millis(20));
        (resident(), handles())
    }
}

/// Whether a cycle lets every request go on. Many in a row do, so that whole lives of requests lie in them.
fn is_gentle(cycle: usize) -> bool {
    cycle % 40 < 20
}

/// Says that its thread has failed.
struct Fails<'a>(&'a Soak);

impl Drop for Fails<'_> {
    fn drop(&mut self) {
        if thread::panicking() {
            self.0.failed.store(true, Ordering::SeqCst);
            self.0.over.store(true, Ordering::SeqCst);
            // Nobody waits for an engine that will not wake.
            drop(self.0.handle.stop());
        }
    }
}

fn soak(seed: u64, requests: usize) -> Metrics {
    let oracle: &'static Oracle = Box::leak(Box::new(Oracle::new()));
    // All that it will have to know, so that it does not grow.
    for set in 0..SETS {
        (0..REQUESTS).for_each(|number| drop(oracle.answer(Mix::of(set), &request(number))));
    }
    let mut options = ControllerOptions::default();
    options.while_not_serving = WhileNotServing::Queue;
    options.stream_buffer = 8;
    options.reload = Some(Reload::new(move || Payload::source(oracle.whole(0))));
    let engine = common::awake(common::tiny_builder(false, DType::F32), &oracle.weights(Mix::of(0)));
    let mut sent = Vec::with_capacity(4 * CYCLES);
    sent.push(Mix::of(0));
    let soak = Soak {
        handle: Controller::with(options).drive(engine),
        oracle,
        watch: Arc::default(),
        allowed: 0.into(),
        begun: 0.into(),
        done: 0.into(),
        dropped: 0.into(),
        finished: 0.into(),
        aborted: 0.into(),
        over: false.into(),
        gentle: false.into(),
        failed: false.into(),
        sent: Mutex::new(sent),
    };
    let mut first = None;
    thread::scope(|scope| {
        let (_fails, _ends) = (Fails(&soak), Ends(&soak.watch));
        scope.spawn(|| soak.watch.look(&soak.handle, seed));
        for client in 0..CLIENTS as u64 {
            let soak = &soak;
            scope.spawn(move || {
                let _fails = Fails(soak);
                soak.client(seed ^ client);
            });
        }
        for number in 0..CYCLES {
            let to = requests * (number + 1) / CYCLES;
            soak.allow(to, false);
            soak.gentle.store(is_gentle(number), Ordering::SeqCst);
            soak.cycle(number);
            if number == WARM_UP {
                soak.allow(to, true);
                first = Some(soak.measure());
            }
        }
        soak.allow(requests, true);
        let (before, handles_before) = first.expect("more cycles than the warm-up");
        let (after, handles_after) = soak.measure();
        println!("{before} bytes, {handles_before:?} before, {after} bytes, {handles_after:?} after");
        assert!(after - before < MIB, "{} cycles grew by {} bytes", CYCLES - WARM_UP, after - before);
        assert_eq!(handles_after, handles_before, "descriptors, threads, mappings");
        soak.over.store(true, Ordering::SeqCst);
    });
    finish(&soak, requests)
}

/// Everything has ended, was counted, and left nothing.
fn finish(soak: &Soak, requests: usize) -> Metrics {
    let status = soak.handle.status();
    assert_eq!((status.live_requests, status.requests_aside, status.control_queue), (0, 0, 0));
    assert_eq!((status.busy, status.step_error), (None, None));
    let metrics = soak.handle.metrics();
    let count = |counter: &AtomicU64| counter.load(Ordering::SeqCst);
    let (finished, aborted) = (count(&soak.finished), count(&soak.aborted));
    assert_eq!(metrics.accepted, requests as u64);
    assert_eq!(finished + aborted + count(&soak.dropped), requests as u64, "none is lost");
    assert_eq!(metrics.finished + metrics.aborted, requests as u64);
    assert!(metrics.finished >= finished && metrics.aborted >= aborted, "{metrics:?}");
    let dropped = count(&soak.dropped);
    println!(
        "{finished} finished, {aborted} aborted, {dropped} dropped, of which {} ran on",
        metrics.finished - finished
    );
    assert!(metrics.aborted - aborted > dropped / 8, "what is dropped does not run on: {metrics:?}");
    assert_eq!((metrics.failed, metrics.refused.len()), (0, 0));
    let stats = metrics.engine;
    assert_eq!((stats.live_requests, stats.waiting, stats.running, stats.blocks_owned), (0, 0, 0, 0));
    assert_eq!(stats.blocks_free + stats.blocks_cached, stats.blocks, "{stats:?}");
    drop(soak.handle.stop().expect("the first to stop it"));
    assert_eq!(soak.handle.state().lifecycle, Lifecycle::Stopped);
    metrics
}

#[test]
fn c26_b56_ten_thousand_requests_and_two_hundred_cycles_are_flat() {
    let requests = dice::number("DORMOUSE_SOAK_REQUESTS").unwrap_or(10_000) as usize;
    let seed = dice::seed("DORMOUSE_SOAK_SEED");
    println!("DORMOUSE_SOAK_SEED={seed}");
    soak(seed, requests);
}
