//! What driving an engine at run time costs: round trips of control requests while tokens are generated, and
//! streaming through a handle and over HTTP, beside the engine itself.
//!
//! `cargo bench --bench serve -- [--model DIR] [--threads N] [--short] [--json FILE]`
//!
//! Every time is a median. Nothing is asserted: a busy machine is slow, not wrong.
#![expect(clippy::print_stdout, reason = "the numbers are the point")]

mod common;
#[path = "serve/http_server.rs"]
mod http_server;
#[path = "serve/round_trips.rs"]
mod round_trips;
#[allow(dead_code, reason = "a program of its own, of which this uses a part")]
#[path = "../examples/serve/main.rs"]
mod server;
#[path = "serve/streaming.rs"]
mod streaming;

use std::path::PathBuf;
use std::time::Instant;

use dormouse::{Awake, Engine, KvCapacity};

use common::Outcome;
use common::report::Report;
// The example's own paths begin at its root.
#[allow(unused_imports, reason = "the example names them")]
use server::*;

/// What the command line asks for.
#[derive(Debug)]
struct Options {
    model: PathBuf,
    threads: usize,
    /// Fewer repetitions, so that everything takes some seconds.
    short: bool,
    json: Option<PathBuf>,
}

impl Options {
    fn parse(mut args: impl Iterator<Item = String>) -> Outcome<Self> {
        let mut options = Self {
            model: concat!(env!("CARGO_MANIFEST_DIR"), "/examples/model").into(),
            threads: std::thread::available_parallelism().map_or(1, usize::from),
            short: false,
            json: None,
        };
        while let Some(arg) = args.next() {
            let mut value = || args.next().ok_or_else(|| format!("{arg} needs a value"));
            match arg.as_str() {
                "--model" => options.model = value()?.into(),
                "--threads" => options.threads = value()?.parse()?,
                "--json" => options.json = Some(value()?.into()),
                "--short" => options.short = true,
                // Cargo's own.
                "--bench" => {}
                other => return Err(format!("unknown argument {other}").into()),
            }
        }
        Ok(options)
    }

    /// `full` repetitions, or fewer in a short run.
    fn times(&self, full: usize, short: usize) -> usize {
        if self.short { short } else { full }
    }

    fn engine(&self) -> Outcome<Engine<Awake>> {
        let builder = Engine::builder(&self.model).threads(self.threads).prefix_cache(false);
        Ok(builder.kv_cache(KvCapacity::Tokens(16 << 10)).build()?)
    }
}

fn main() -> Outcome {
    let options = Options::parse(std::env::args().skip(1))?;
    let begin = Instant::now();
    let mut report = Report::new();
    let cores = std::thread::available_parallelism().map_or(1, usize::from);
    println!("{} on {} threads ({cores} cores)", common::machine::cpu_name(), options.threads);
    report.note("threads", options.threads);
    report.note("model", options.model.to_string_lossy());
    report.note("short", options.short);
    round_trips::measure(&options, &mut report)?;
    streaming::overhead(&options, &mut report)?;
    println!("\n{:.1} s in all", begin.elapsed().as_secs_f64());
    if let Some(path) = &options.json {
        report.save(path)?;
    }
    Ok(())
}
