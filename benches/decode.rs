//! How fast generation and the lifecycle are, beside what the machine could do at most.
//!
//! `cargo bench --bench decode -- [--model DIR] [--threads N] [--simd auto|avx2|portable] [--short]
//! [--json FILE]`
//!
//! Every time is a median. Nothing is asserted: a busy machine is slow, not wrong.
#![expect(clippy::print_stdout, reason = "the numbers are the point")]

mod common;
#[path = "decode/generation.rs"]
mod generation;
#[path = "decode/lifecycle.rs"]
mod lifecycle;
#[path = "decode/overhead.rs"]
mod overhead;

use std::path::PathBuf;
use std::time::Instant;

use dormouse::{Awake, Engine, KvCapacity, SimdPath};

use common::report::Report;
use common::{Outcome, machine};

/// What the command line asks for.
#[derive(Debug)]
struct Options {
    model: PathBuf,
    threads: usize,
    simd: SimdPath,
    /// Fewer repetitions, so that everything takes some seconds.
    short: bool,
    json: Option<PathBuf>,
}

impl Options {
    fn parse(mut args: impl Iterator<Item = String>) -> Outcome<Self> {
        let mut options = Self {
            model: concat!(env!("CARGO_MANIFEST_DIR"), "/examples/model").into(),
            threads: std::thread::available_parallelism().map_or(1, usize::from),
            simd: SimdPath::Auto,
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
                "--simd" => {
                    options.simd = match value()?.as_str() {
                        "auto" => SimdPath::Auto,
                        "avx2" => SimdPath::Avx2,
                        "portable" => SimdPath::Portable,
                        other => return Err(format!("no such path: {other}").into()),
                    }
                }
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

    /// GB/s at which all threads read memory now.
    fn read_limit(&self) -> f64 {
        machine::read_limit(self.threads, self.times(1 << 30, 512 << 20), self.times(7, 3))
    }

    fn engine(&self) -> Outcome<Engine<Awake>> {
        let engine = Engine::builder(&self.model)
            .threads(self.threads)
            .simd(self.simd)
            .kv_cache(KvCapacity::Tokens(6 << 10))
            // Each prompt is computed, whatever was computed before.
            .prefix_cache(false)
            .build()?;
        Ok(engine)
    }
}

/// Says what the machine is, and how fast.
fn head(options: &Options, limit: f64) -> Report {
    let mut report = Report::new();
    let (cpu, simd) = (machine::cpu_name(), machine::simd_name(options.simd));
    let cores = std::thread::available_parallelism().map_or(1, usize::from);
    println!("{cpu} on {} threads ({cores} cores), {simd}", options.threads);
    println!("memory is read at {limit:.1} GB/s (a buffer larger than the caches, all threads)");
    report.note("threads", options.threads);
    report.note("simd", simd);
    report.note("model", options.model.to_string_lossy());
    report.note("short", options.short);
    report.note("read_limit_gb_per_s", limit);
    report
}

fn main() -> Outcome {
    let options = Options::parse(std::env::args().skip(1))?;
    let begin = Instant::now();
    let limit = options.read_limit();
    let mut report = head(&options, limit);

    let engine = options.engine()?;
    let costs = generation::Costs::of(&engine);
    costs.print(&options, &engine);
    report.note("step_bytes", costs.step_bytes);
    let steps = generation::decode(&options, &engine, &costs, limit, &mut report)?;
    generation::prefill(&options, &engine, &costs, &mut report)?;
    generation::sampling(&options, &engine, &steps, &mut report)?;
    overhead::step(&options, &mut report)?;
    lifecycle::phases(&options, engine, &mut report)?;
    println!("\n{:.1} s in all", begin.elapsed().as_secs_f64());
    if let Some(path) = &options.json {
        report.save(path)?;
    }
    Ok(())
}
