//! Text from a checkpoint: tokenises a prompt, generates, prints the text as it comes and each token's logprob.
//!
//! ```sh
//! cargo run --release --example generate                                   # the small model of this repository
//! cargo run --release --example generate -- --model DIR "Once upon a time" # any checkpoint with a tokenizer.json
//! cargo run --release --features cuda --example generate -- --cuda 0       # on a GPU
//! ```

use std::error::Error;
use std::io::Write as _;

use dormouse::{Engine, Request};
use tokenizers::Tokenizer;

fn main() -> std::process::ExitCode {
    let Err(error) = run() else { return std::process::ExitCode::SUCCESS };
    eprintln!("generate: {error}");
    std::process::ExitCode::FAILURE
}

fn run() -> Result<(), Box<dyn Error>> {
    let mut model = concat!(env!("CARGO_MANIFEST_DIR"), "/examples/model").to_owned();
    let mut prompt = "47+38=(".to_owned();
    #[cfg(feature = "cuda")]
    let mut gpu: Option<u32> = None;
    let mut args = std::env::args().skip(1);
    while let Some(arg) = args.next() {
        match arg.as_str() {
            "--model" => model = args.next().ok_or("--model needs a directory")?,
            #[cfg(feature = "cuda")]
            "--cuda" => gpu = Some(args.next().ok_or("--cuda needs the number of a GPU")?.parse()?),
            _ if arg.starts_with("--") => {
                return Err(format!(
                    "unknown option {arg}; there is --model, and --cuda with the feature `cuda`"
                )
                .into());
            }
            _ => prompt = arg,
        }
    }
    let tokenizer = Tokenizer::from_file(format!("{model}/tokenizer.json")).map_err(|e| e.to_string())?;
    let builder = Engine::builder(&model);
    #[cfg(feature = "cuda")]
    let builder = match gpu {
        Some(ordinal) => builder.cuda(ordinal),
        None => builder,
    };
    let engine = builder.build()?;
    let tokens = tokenizer.encode(prompt.as_str(), true).map_err(|e| e.to_string())?.get_ids().to_vec();

    let begin = std::time::Instant::now();
    engine.submit(Request::new(tokens).max_new_tokens(48).temperature(0.0).stream(true))?;
    print!("{prompt}");
    let mut text = tokenizer.decode_stream(true);
    let output = loop {
        let step = engine.step()?;
        for token in &step.tokens {
            // Some tokens are a part of a character: their text comes with the rest of it.
            print!("{}", text.step(token.token).map_err(|e| e.to_string())?.unwrap_or_default());
            std::io::stdout().flush()?;
        }
        if let Some(output) = step.outputs.into_iter().next() {
            break output;
        }
    };
    let seconds = begin.elapsed().as_secs_f64();
    println!();

    let completion = &output.completions[0];
    println!("finish: {}, version: {}", completion.finish_reason.as_str(), engine.version());
    for (token, logprob) in completion.tokens.iter().zip(&completion.logprobs) {
        println!("{token:>7} {logprob:>9.4}  {:?}", tokenizer.id_to_token(*token).unwrap_or_default());
    }
    println!("{} tokens in {seconds:.2} s", completion.tokens.len());
    assert!(!completion.tokens.is_empty());
    Ok(())
}
