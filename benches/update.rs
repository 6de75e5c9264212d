//! How fast weights come in, by each way, beside what copying the same bytes costs in the same run.
//!
//! `cargo bench --bench update -- [--model DIR] [--threads N] [--short] [--json FILE] [--python PATH]`
//!
//! Without a model, one of 65 MB is made of random numbers. `--python` names an interpreter with torch and
//! safetensors, whose `load_state_dict` is then timed as well. Every time is the median of rounds that run
//! everything once; nothing is asserted: a busy machine is slow, not wrong.
#![expect(clippy::print_stdout, reason = "the numbers are the point")]

#[path = "update/baselines.rs"]
mod baselines;
mod common;
#[path = "update/model.rs"]
mod model;
#[path = "update/peers.rs"]
mod peers;
#[path = "update/process.rs"]
mod process;
#[path = "update/times.rs"]
mod times;
#[path = "update/ways.rs"]
mod ways;

use std::path::PathBuf;
use std::time::Instant;

use common::report::{Cell, Report};
use common::{Outcome, machine};
use model::Model;
use process::Trainer;
use times::Times;

/// What the command line asks for.
#[derive(Debug)]
struct Options {
    model: Option<PathBuf>,
    threads: usize,
    /// Fewer rounds.
    short: bool,
    json: Option<PathBuf>,
    python: Option<PathBuf>,
}

impl Options {
    fn parse(mut args: impl Iterator<Item = String>) -> Outcome<Self> {
        let mut options = Self {
            model: None,
            threads: std::thread::available_parallelism().map_or(1, usize::from),
            short: false,
            json: None,
            python: None,
        };
        while let Some(arg) = args.next() {
            let mut value = || args.next().ok_or_else(|| format!("{arg} needs a value"));
            match arg.as_str() {
                "--model" => options.model = Some(value()?.into()),
                "--threads" => options.threads = value()?.parse()?,
                "--json" => options.json = Some(value()?.into()),
                "--python" => options.python = Some(value()?.into()),
                "--short" => options.short = true,
                // Cargo's own.
                "--bench" => {}
                other => return Err(format!("unknown argument {other}").into()),
            }
        }
        Ok(options)
    }

    fn rounds(&self) -> usize {
        if self.short { 2 } else { 9 }
    }

    /// One thread, and as many as wanted.
    fn thread_counts(&self) -> Vec<usize> {
        let mut counts = vec![1, self.threads];
        counts.dedup();
        counts
    }
}

fn main() -> Outcome {
    let args: Vec<String> = std::env::args().skip(1).collect();
    if let [flag, directory, socket] = &args[..]
        && flag == process::FLAG
    {
        return process::train(directory.as_ref(), socket.as_ref());
    }
    let options = Options::parse(args.into_iter())?;
    let begin = Instant::now();
    let model = Model::open(options.model.as_deref())?;
    let trainer = Trainer::start(&model)?;
    let report = &mut Report::new();
    head(&options, &model, report);

    let mut times = Times::default();
    let mut engines = Vec::new();
    for threads in options.thread_counts() {
        engines.push(Some(model.engine(threads)?));
    }
    let mut ways = ways::all(&model, &trainer)?;
    for _ in 0..options.rounds() {
        baselines::round(&model, &mut times)?;
        peers::candle(&model, &mut times)?;
        for (slot, threads) in engines.iter_mut().zip(options.thread_counts()) {
            let engine = slot.take().ok_or("an engine per round")?;
            *slot = Some(ways::round(&model, &ways, engine, threads, &mut times)?);
        }
        // Who comes first after other things finds caches and huge pages in another state.
        ways.rotate_left(1);
    }
    if let Some(python) = &options.python {
        peers::python(python, &model, options.rounds(), &mut times)?;
    }
    print(&options, &times, report);
    println!("\n{:.1} s in all", begin.elapsed().as_secs_f64());
    if let Some(path) = &options.json {
        report.save(path)?;
    }
    Ok(())
}

fn head(options: &Options, model: &Model, report: &mut Report) {
    let megabytes = model.bytes as f64 / 1e6;
    println!("{}, 1 and {} threads", machine::cpu_name(), options.threads);
    println!("{}: {} tensors, {megabytes:.1} MB", model.name, model.tensors.len());
    report.note("threads", options.threads);
    report.note("short", options.short);
    report.note("model", model.name.clone());
    report.note("model_bytes", model.bytes);
}

fn print(options: &Options, times: &Times, report: &mut Report) {
    let rows = times.rows(baselines::YARDSTICK, baselines::MEMCPY);
    let title =
        "Ways in. The yardstick copies each tensor into new memory and digests it there, on one thread";
    report.table("update", title, &Times::COLUMNS, &rows);

    let mut rows = Vec::new();
    for threads in options.thread_counts() {
        let ms = |name| times.median_ms(name, threads);
        let (digest, update) = (ms(ways::DIGEST), ms(ways::MEMORY));
        rows.push(vec![
            Cell::Text(format!("{threads} threads")),
            Cell::Number(digest, 1),
            Cell::Number(update, 1),
            Cell::Number(100.0 * digest / update, 1),
        ]);
    }
    let title = "What the digest costs: as many bytes digested by the same code from a block that stays in the \
                 second-level cache, as an update digests what it is about to pack";
    let columns = ["digest", "ms", "update from memory ms", "% of it"];
    report.table("digest", title, &columns, &rows);
}
