//! Text from a checkpoint: tokenises a prompt, generates, prints the text and each token's logprob.
//!
//! ```sh
//! cargo run --release --example generate                                   # the small model of this repository
//! cargo run --release --example generate -- --model DIR "Once upon a time" # any checkpoint with a tokenizer.json
//! ```

use std::error::Error;

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
    let mut args = std::env::args().skip(1);
    while let Some(arg) = args.next() {
        match arg.as_str() {
            "--model" => model = args.next().ok_or("--model needs a directory")?,
            _ if arg.starts_with("--") => {
                return Err(format!("unknown option {arg}; there is --model").into());
            }
            _ => prompt = arg,
        }
    }
    let tokenizer = Tokenizer::from_file(format!("{model}/tokenizer.json")).map_err(|e| e.to_string())?;
    let engine = Engine::builder(&model).build()?;
    let tokens = tokenizer.encode(prompt.as_str(), true).map_err(|e| e.to_string())?.get_ids().to_vec();

    let begin = std::time::Instant::now();
    let outputs = engine.generate(&[Request::new(tokens).max_new_tokens(48).temperature(0.0)])?;
    let seconds = begin.elapsed().as_secs_f64();

    let completion = &outputs[0].completions[0];
    let text = tokenizer.decode(&completion.tokens, true).map_err(|e| e.to_string())?;
    println!("{prompt}{text}");
    println!("finish: {}, version: {}", completion.finish_reason.as_str(), engine.version());
    for (token, logprob) in completion.tokens.iter().zip(&completion.logprobs) {
        println!("{token:>7} {logprob:>9.4}  {:?}", tokenizer.id_to_token(*token).unwrap_or_default());
    }
    println!("{} tokens in {seconds:.2} s", completion.tokens.len());
    assert!(!completion.tokens.is_empty());
    Ok(())
}
