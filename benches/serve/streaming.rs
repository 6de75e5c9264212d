//! Streaming of a batch: by the engine itself, through a handle, and over HTTP.

use std::net::SocketAddr;
use std::time::{Duration, Instant};

use dormouse::control::{Controller, Generation, GenerationEvent, Handle};
use dormouse::{Awake, Engine, Request};

use super::common::report::{Cell, Report};
use super::common::{Outcome, median};
use super::{Options, http_server};

const BATCH: usize = 16;

/// Decode speed of a batch of 16 streams, in each way, turn by turn so that a busy moment meets all.
pub(crate) fn overhead(options: &Options, report: &mut Report) -> Outcome {
    let tokens = options.times(128, 32);
    let rounds = options.times(5, 2);
    let engine = options.engine()?;
    let handle = Controller::spawn(options.engine()?);
    let address = http_server::start(&handle, &options.model)?;
    let (mut direct, mut through, mut http) = (Vec::new(), Vec::new(), Vec::new());
    for _ in 0..rounds {
        direct.push(step_engine(&engine, tokens)?);
        through.push(stream(&handle, tokens)?);
        http.push(stream_http(address, tokens)?);
    }
    let direct = median(direct);
    let ways = [
        ("engine, a loop of steps", direct),
        ("through a handle", median(through)),
        ("over HTTP, with logprobs", median(http)),
    ];
    let rows = ways.map(|(way, time)| {
        let speed = |time: Duration| (BATCH * tokens) as f64 / time.as_secs_f64();
        let cost = 100.0 * (time.as_secs_f64() / direct.as_secs_f64() - 1.0);
        vec![Cell::Text(way.into()), Cell::Number(speed(time), 0), Cell::Number(cost, 1)]
    });
    let title = "Streaming at batch 16 (prompt of 4 tokens; from the first submission to the last token)";
    report.table("streaming", title, &["way", "token/s", "cost %"], &rows);
    Ok(())
}

fn prompt(n: usize) -> Vec<u32> {
    vec![1 + n as u32; 4]
}

fn request(n: usize, tokens: usize) -> Request {
    let request = Request::new(prompt(n)).max_new_tokens(tokens);
    request.ignore_eos(true).temperature(0.0).stream(true)
}

fn step_engine(engine: &Engine<Awake>, tokens: usize) -> Outcome<Duration> {
    let begin = Instant::now();
    for n in 0..BATCH {
        engine.submit(request(n, tokens))?;
    }
    let mut streamed = 0;
    loop {
        let step = engine.step()?;
        streamed += step.tokens.len();
        if step.is_idle() {
            break;
        }
    }
    assert_eq!(streamed, BATCH * tokens, "each token is streamed");
    Ok(begin.elapsed())
}

fn stream(handle: &Handle, tokens: usize) -> Outcome<Duration> {
    let begin = Instant::now();
    let generations: Vec<Generation> =
        (0..BATCH).map(|n| handle.submit(request(n, tokens))).collect::<Result<_, _>>()?;
    let readers: Vec<_> = generations
        .into_iter()
        .map(|mut generation| {
            std::thread::spawn(move || {
                let token = |event: &Result<_, _>| matches!(event, Ok(GenerationEvent::Token(_)));
                generation.events().filter(token).count()
            })
        })
        .collect();
    let streamed: usize = readers.into_iter().map(|reader| reader.join().unwrap_or_default()).sum();
    assert_eq!(streamed, BATCH * tokens, "each token is streamed");
    Ok(begin.elapsed())
}

fn stream_http(address: SocketAddr, tokens: usize) -> Outcome<Duration> {
    let begin = Instant::now();
    let clients: Vec<_> = (0..BATCH)
        .map(|n| {
            std::thread::spawn(move || {
                http_server::stream(address, &prompt(n), tokens).map_err(|error| error.to_string())
            })
        })
        .collect();
    for client in clients {
        let streamed = client.join().map_err(|_| "a client panicked")??;
        assert_eq!(streamed, tokens, "each token is streamed");
    }
    Ok(begin.elapsed())
}
