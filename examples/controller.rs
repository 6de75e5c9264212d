//! An engine driven at run time: requests from several threads, a control thread that sleeps, updates and wakes it,
//! and an operation out of order that is refused by name.
//!
//! `cargo run --release --example controller -- [--model DIR]`
#![expect(clippy::print_stdout, reason = "an example talks")]

use std::error::Error;

use dormouse::control::{
    Controller, GenerationEvent, MissingStep, Operation, Payload, SleepPlan, SleepWeights, Tags,
};
use dormouse::{Checkpoint, Engine, InFlight, Request, UpdateOptions};

fn main() -> Result<(), Box<dyn Error>> {
    let model = std::env::args().skip_while(|arg| arg != "--model").nth(1);
    let model = model.unwrap_or_else(|| concat!(env!("CARGO_MANIFEST_DIR"), "/examples/model").into());
    let handle = Controller::spawn(Engine::builder(&model).build()?);

    // A long request, read as it comes. It will live through a sleep.
    let long = Request::new(vec![1, 2, 3]).max_new_tokens(48).ignore_eos(true).seed(7).stream(true);
    let mut streaming = handle.submit(long.clone())?;
    let (begun, has_begun) = std::sync::mpsc::sync_channel(48);
    let reader = std::thread::spawn(move || {
        let mut tokens = Vec::new();
        for event in streaming.events() {
            match event {
                Ok(GenerationEvent::Token(token)) => {
                    tokens.push(token.token);
                    begun.send(())?;
                }
                Ok(GenerationEvent::Done(output)) => return Ok((tokens, output)),
                Err(error) => return Err::<_, Box<dyn Error + Send + Sync>>(error.into()),
            }
        }
        unreachable!("the last event is the output, or an error")
    });

    has_begun.recv()?;

    // An update of an engine that is awake is refused, and says what must come first.
    let update = || Operation::UpdateWeights {
        weights: Payload::source(Checkpoint::at(&model)),
        options: UpdateOptions::default(),
    };
    let refused = handle.run(update()).expect_err("the KV cache is there");
    println!("refused: {refused}");
    assert_eq!(refused.missing_step(), Some(MissingStep::SleepKvCache));

    let sleep = SleepPlan { weights: SleepWeights::Discard, in_flight: InFlight::Retract, tags: Tags::ALL };
    for operation in [
        Operation::Sleep(sleep),
        Operation::WakeUp { tags: Tags::WEIGHTS },
        update(),
        Operation::WakeUp { tags: Tags::KV_CACHE },
    ] {
        let done = handle.run(operation)?;
        println!("{}: {} -> {} in {:?}", done.operation, done.state_before, done.state_after, done.executed);
    }

    let (tokens, output) =
        reader.join().expect("the reader doesn't panic").map_err(|error| error.to_string())?;
    println!(
        "{} tokens, under {} versions of the weights",
        tokens.len(),
        output.completions[0].versions.len()
    );
    assert_eq!(tokens, output.completions[0].tokens);
    // The weights are the same, so the sleep changed nothing.
    let again = handle.submit(long)?.wait()?;
    assert_eq!(again.completions[0].tokens, tokens);
    Ok(())
}
