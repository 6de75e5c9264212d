//! A whole reinforcement-learning loop: rollouts in groups → rewards → sleep, dropping weights and KV → new
//! weights → load → wake → again.
//!
//! ```sh
//! cargo run --release --example rl_loop                  # the small model of this repository, half a minute
//! cargo run --release --example rl_loop -- --model DIR   # any checkpoint with a tokenizer.json
//! ```
//!
//! The policy was trained on the homework of imaginary pupils: it does sums with a carry, mostly wrong, but right
//! when it shows its work first, which it seldom does. Rewarded for right answers alone it learns to show its work.
//! The trainer is an evolution strategy: it rolls out with perturbed weights and moves towards the perturbations
//! that earn more. It needs no gradients, and goes through the engine's lifecycle once for every member of every
//! population.
//!
//! Options: `--steps N`, `--population N`, `--prompts N`, `--samples N`, `--sigma X`, `--rate X`, `--seed N`,
//! `--plot FILE`, `--short` (a few small steps).

mod plot;
mod task;
mod trainer;

use std::error::Error;
use std::io::{IsTerminal, Write};
use std::time::{Duration, Instant};

use dormouse::{Awake, Engine, KvCapacity, SleepOptions, WeightVersion};
use task::{Reward, Sums};
use trainer::EvolutionStrategy;

/// Options of a run.
struct Options {
    model: String,
    steps: usize,
    population: usize,
    prompts: usize,
    samples: usize,
    sigma: f32,
    rate: f32,
    seed: u64,
    plot: String,
    short: bool,
}

impl Options {
    fn parse() -> Result<Self, Box<dyn Error>> {
        let mut options = Self {
            model: concat!(env!("CARGO_MANIFEST_DIR"), "/examples/model").to_owned(),
            steps: 36,
            population: 32,
            prompts: 16,
            samples: 4,
            sigma: 0.06,
            rate: 3.0,
            seed: 0,
            plot: "target/rl_loop.svg".to_owned(),
            short: false,
        };
        let mut args = std::env::args().skip(1);
        while let Some(arg) = args.next() {
            if arg == "--short" {
                (options.short, options.steps, options.population) = (true, 3, 4);
                continue;
            }
            let known =
                "--model --steps --population --prompts --samples --sigma --rate --seed --plot --short";
            if !known.split(' ').any(|option| option == arg) {
                return Err(format!("unknown option {arg}; there are {known}").into());
            }
            let value = args.next().ok_or_else(|| format!("{arg} needs a value"))?;
            match arg.as_str() {
                "--model" => options.model = value,
                "--steps" => options.steps = value.parse()?,
                "--population" => options.population = value.parse()?,
                "--prompts" => options.prompts = value.parse()?,
                "--samples" => options.samples = value.parse()?,
                "--sigma" => options.sigma = value.parse()?,
                "--rate" => options.rate = value.parse()?,
                "--seed" => options.seed = value.parse()?,
                "--plot" => options.plot = value,
                _ => unreachable!("all known options are above"),
            }
        }
        if options.prompts == 0 || options.samples == 0 || options.steps == 0 {
            return Err("--prompts, --samples and --steps are at least 1".into());
        }
        if options.population == 0 || !options.population.is_multiple_of(2) {
            return Err("--population is an even number: perturbations come in pairs".into());
        }
        Ok(options)
    }
}

/// What one step of the loop took, summed over its population.
#[derive(Default)]
struct StepCosts {
    tokens: usize,
    prompt_tokens: usize,
    cached_tokens: usize,
    generate: Duration,
    sleep: Duration,
    load: Duration,
    wake: Duration,
    freed_bytes: u64,
}

fn main() -> std::process::ExitCode {
    let Err(error) = run() else { return std::process::ExitCode::SUCCESS };
    eprintln!("rl_loop: {error}");
    std::process::ExitCode::FAILURE
}

fn run() -> Result<(), Box<dyn Error>> {
    let options = Options::parse()?;
    let task = Sums::new(&options.model)?;
    let mut trainer = EvolutionStrategy::open(&options.model, options.sigma, options.rate)?;
    let engine = Engine::builder(&options.model).kv_cache(KvCapacity::Tokens(1 << 14)).build()?;
    println!("{}: {} parameters, weights {}", options.model, trainer.parameters(), engine.version());

    let before = task.held_out(&engine, 200)?;
    println!("held-out sums before: {:.1} % right\n", 100.0 * before.mean);
    println!(
        "{:>4} {:>7} {:>7} {:>9} {:>7} {:>6} {:>6} {:>6} {:>9}  weights",
        "step", "reward", "best", "tokens/s", "cached", "sleep", "load", "wake", "freed"
    );
    let begin = Instant::now();
    let (mut engine, mut curve) = (engine, Vec::new());
    for step in 0..options.steps {
        let Population { engine: awake, rewards, costs } = roll_out(engine, &task, &trainer, &options, step)?;
        engine = awake;
        trainer.update(step_seed(&options, step), &rewards);
        let mean = rewards.iter().sum::<f32>() / rewards.len() as f32;
        let best = rewards.iter().copied().fold(f32::MIN, f32::max);
        curve.push(mean);
        print_row(step, mean, best, &costs, options.population, engine.version());
    }
    // The updated policy itself.
    let asleep = engine.sleep_discarding(SleepOptions::default())?;
    let engine = asleep.load_weights(trainer.policy().source())?.wake_up()?;
    let after = task.held_out(&engine, 200)?;
    plot::write_svg(&options.plot, &curve)?;
    println!(
        "\nheld-out sums after: {:.1} % right (before: {:.1} %)",
        100.0 * after.mean,
        100.0 * before.mean
    );
    println!(
        "{} steps in {:.0} s; the curve is in {}",
        options.steps,
        begin.elapsed().as_secs_f32(),
        options.plot
    );
    if !options.short && curve.len() >= 20 {
        let (first, last) = (&curve[..5], &curve[curve.len() - 5..]);
        let mean = |rewards: &[f32]| rewards.iter().sum::<f32>() / rewards.len() as f32;
        assert!(mean(last) > mean(first), "the reward rose");
    }
    Ok(())
}

/// What a population's rollouts left.
struct Population {
    engine: Engine<Awake>,
    /// Mean reward of each member.
    rewards: Vec<f32>,
    costs: StepCosts,
}

/// Rolls out with each member of a population: for each, the lifecycle once around.
fn roll_out(
    mut engine: Engine<Awake>,
    task: &Sums,
    trainer: &EvolutionStrategy,
    options: &Options,
    step: usize,
) -> Result<Population, Box<dyn Error>> {
    let (mut rewards, mut costs) = (Vec::new(), StepCosts::default());
    let seed = step_seed(options, step);
    for member in 0..options.population {
        progress(member, options.population);
        // Asleep, without weights and KV: the memory is the trainer's.
        let asleep = engine.sleep_discarding(SleepOptions::default())?;
        costs.sleep += asleep.report().free;
        costs.freed_bytes += asleep.report().freed.total_bytes();
        let perturbed = trainer.member(seed, member);
        let loaded = asleep.load_weights(perturbed.source())?;
        costs.load += loaded.report().receiving;
        engine = loaded.wake_up()?;
        costs.wake += engine.report().wake;

        let begin = Instant::now();
        // The same problems and the same random streams for all members: only the weights differ.
        let Reward { mean, tokens, prompt_tokens, cached_tokens } =
            task.rollout(&engine, seed, options.prompts, options.samples)?;
        costs.generate += begin.elapsed();
        costs.tokens += tokens;
        costs.prompt_tokens += prompt_tokens;
        costs.cached_tokens += cached_tokens;
        rewards.push(mean);
    }
    Ok(Population { engine, rewards, costs })
}

fn step_seed(options: &Options, step: usize) -> u64 {
    options.seed.wrapping_mul(1 << 32) + step as u64
}

fn progress(member: usize, population: usize) {
    if std::io::stdout().is_terminal() {
        let done = 30 * member / population;
        print!("\r[{}{}] {member}/{population}", "=".repeat(done), " ".repeat(30 - done));
        drop(std::io::stdout().flush());
    }
}

fn print_row(step: usize, mean: f32, best: f32, costs: &StepCosts, members: usize, version: WeightVersion) {
    let each = |duration: Duration| duration.as_secs_f64() * 1e3 / members as f64;
    let clear = if std::io::stdout().is_terminal() { "\r\x1b[K" } else { "" };
    println!(
        "{clear}{step:>4} {mean:>7.3} {best:>7.3} {:>9.0} {:>6.1}% {:>4.1}ms {:>4.1}ms {:>4.1}ms {:>6.1} MB  {version}",
        costs.tokens as f64 / costs.generate.as_secs_f64(),
        100.0 * costs.cached_tokens as f64 / costs.prompt_tokens as f64,
        each(costs.sleep),
        each(costs.load),
        each(costs.wake),
        costs.freed_bytes as f64 / members as f64 / 1e6,
    );
}
