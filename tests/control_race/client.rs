//! Threads that generate: each request ends once, or is dropped.

use std::sync::atomic::Ordering;
use std::task::{Context, Poll, Waker};
use std::time::Duration;

use dormouse::control::{
    AbortTarget, Generation, GenerationError, GenerationEvent, GenerationToken, SubmitError,
};
use dormouse::{Request, RequestError, RequestOutput};

use crate::dice::Dice;
use crate::oracle::{REQUESTS, request, was_aborted};
use crate::world::{Ended, World, add, block_on};

/// Names that requests share.
const NAMES: usize = 12;

/// A request on its way.
struct Running<'a> {
    request: Request,
    carried: Vec<usize>,
    generation: Generation,
    tokens: Vec<GenerationToken>,
    world: &'a World,
    _waiting: crate::watch::Waiting<'a>,
}

type Event = Result<GenerationEvent, GenerationError>;

/// What a client keeps of requests that were aborted.
pub(crate) type Partials = Vec<(Request, RequestOutput)>;

impl World {
    /// A request of any kind, treated in any way.
    pub(crate) fn generate(&self, dice: &mut Dice, partials: &mut Partials) {
        let Some(mut running) = self.submit(dice, partials) else { return };
        match dice.below(12) {
            0 => return running.drop(),
            1 => {
                std::thread::sleep(Duration::from_micros(dice.next() % 2000));
                return running.drop();
            }
            2 => {
                for _ in 0..dice.below(6) {
                    if running.next(dice.one_in(2)).is_some() {
                        return;
                    }
                }
                return running.drop();
            }
            3 | 4 => {
                std::thread::sleep(Duration::from_micros(dice.next() % 1000));
                let mut name = || format!("named-{}", dice.below(NAMES));
                let (requests, names) = match running.request.id.clone() {
                    // By both, and another one that may be there.
                    Some(id) => (vec![running.generation.id()], vec![id, name()]),
                    None => (vec![running.generation.id()], vec![]),
                };
                if self.abort(dice, AbortTarget::These { requests, names }) {
                    let ended = running.poll_to_end();
                    return self.ended.lock().unwrap().push(ended);
                }
            }
            5 => std::thread::sleep(Duration::from_micros(dice.next() % 5000)),
            _ => {}
        }
        let ended = if dice.one_in(3) { running.wait(dice.one_in(2)) } else { running.read(dice) };
        if was_aborted(&ended.output) && partials.len() < 20 {
            partials.push((ended.request.clone(), ended.output.clone()));
        }
        self.ended.lock().unwrap().push(ended);
    }

    fn submit(&self, dice: &mut Dice, partials: &mut Partials) -> Option<Running<'_>> {
        let (mut request, partial) = match partials.len() {
            count if count > 0 && dice.one_in(3) => {
                let (request, partial) = partials.swap_remove(dice.below(count));
                (request, Some(partial))
            }
            _ => (request(dice.below(REQUESTS)).stream(dice.one_in(2)), None),
        };
        request.id = dice.one_in(4).then(|| format!("named-{}", dice.below(NAMES)));
        let lengths = |partial: &RequestOutput| partial.completions.iter().map(|c| c.tokens.len()).collect();
        let carried = partial.as_ref().map_or_else(|| vec![0; request.params.samples], lengths);
        let whole = match &partial {
            Some(partial) => request.resume(partial).expect("its own output"),
            None => request.clone(),
        };
        match self.handle.submit(whole) {
            Ok(generation) => {
                add(&self.tally.accepted);
                let what =
                    format!("request {} ({:?}), stream {}", generation.id(), request.id, request.stream);
                let (tokens, waiting) = (Vec::new(), self.watch.begin(what));
                Some(Running { request, carried, generation, tokens, world: self, _waiting: waiting })
            }
            Err(error) => {
                add(&self.tally.refused);
                match error {
                    SubmitError::NotServing { state, .. } => {
                        assert!(!state.admitting, "refused while it serves");
                        std::thread::sleep(Duration::from_micros(200));
                    }
                    SubmitError::QueueFull { .. } => std::thread::sleep(Duration::from_micros(200)),
                    SubmitError::Request(RequestError::DuplicateId { .. }) => {}
                    SubmitError::Stopped if self.stops => self.over.store(true, Ordering::Relaxed),
                    error => panic!("{error}"),
                }
                None
            }
        }
    }
}

impl Running<'_> {
    fn drop(self) {
        add(&self.world.tally.dropped);
    }

    /// Takes an event; returns the output if it is that.
    fn next(&mut self, awaits: bool) -> Option<RequestOutput> {
        let event = match awaits {
            true => block_on(std::future::poll_fn(|context| self.generation.poll_event(context))),
            false => self.generation.next_event(),
        };
        self.take(event)
    }

    fn take(&mut self, event: Option<Event>) -> Option<RequestOutput> {
        match event.expect("the output is the last event, and comes") {
            Ok(GenerationEvent::Token(token)) => {
                self.tokens.push(token);
                None
            }
            Ok(GenerationEvent::Done(output)) => {
                assert!(self.generation.next_event().is_none(), "nothing comes after the output");
                Some(output)
            }
            Err(error) => panic!("{error}"),
        }
    }

    fn read(mut self, dice: &mut Dice) -> Ended {
        let slow = dice.one_in(4);
        let output = loop {
            if let Some(output) = self.next(dice.one_in(4)) {
                break output;
            }
            if slow {
                std::thread::sleep(Duration::from_micros(dice.next() % 500));
            }
        };
        let Self { request, carried, tokens, .. } = self;
        Ended { request, carried, output, streamed: Some(tokens) }
    }

    /// Reads what is there, the output at its end.
    fn poll_to_end(mut self) -> Ended {
        let output = loop {
            let event = self.generation.poll_event(&mut Context::from_waker(Waker::noop()));
            let Poll::Ready(event) = event else { panic!("it is said to have ended") };
            if let Some(output) = self.take(event) {
                break output;
            }
        };
        let Self { request, carried, tokens, .. } = self;
        Ended { request, carried, output, streamed: Some(tokens) }
    }

    /// Waits for the output and passes the tokens over.
    fn wait(self, awaits: bool) -> Ended {
        let Running { request, carried, generation, .. } = self;
        let id = generation.id();
        let output = if awaits { block_on(generation.output()) } else { generation.wait() };
        let output = output.unwrap_or_else(|error| panic!("request {id}: {error}"));
        Ended { request, carried, output, streamed: None }
    }
}
