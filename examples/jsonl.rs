//! For scripts and comparisons: one request per line on standard input, one completion per line on standard
//! output. Requests are batched together.
//!
//! ```sh
//! echo '{"prompt": [1, 2], "max_new_tokens": 8, "temperature": 0}' | cargo run --release --example jsonl -- --model DIR
//! ```
//!
//! A request has the fields of `Request` by their names. Options: `--model DIR`, `--threads N`,
//! `--kv-blocks N`, `--block-size N`, `--no-prefix-cache`, `--max-batch N` (sequences in a step).

use std::error::Error;
use std::io::{BufRead, BufWriter, Write};

use dormouse::{Engine, FinishReason, KvCapacity, Request, RequestId, RequestOutput};
use serde_json::json;

fn main() -> Result<(), Box<dyn Error>> {
    let mut model = concat!(env!("CARGO_MANIFEST_DIR"), "/examples/model").to_owned();
    let mut options = Vec::new();
    let mut args = std::env::args().skip(1);
    while let Some(arg) = args.next() {
        let mut number = || -> Result<usize, Box<dyn Error>> {
            Ok(args.next().ok_or_else(|| format!("{arg} needs a number"))?.parse()?)
        };
        match arg.as_str() {
            "--model" => model = args.next().ok_or("--model needs a directory")?,
            "--threads" | "--kv-blocks" | "--block-size" | "--max-batch" => {
                options.push((arg.clone(), number()?))
            }
            "--no-prefix-cache" => options.push((arg, 0)),
            _ => return Err(format!("unknown option {arg}").into()),
        }
    }
    let mut builder = Engine::builder(&model);
    for (option, value) in options {
        builder = match option.as_str() {
            "--threads" => builder.threads(value),
            "--kv-blocks" => builder.kv_cache(KvCapacity::Blocks(value)),
            "--block-size" => builder.block_size(value),
            "--max-batch" => builder.max_num_seqs(value),
            _ => builder.prefix_cache(false),
        };
    }
    let engine = builder.build()?;
    let mut out = BufWriter::new(std::io::stdout().lock());
    // Line number of each request, by its id: outputs come as they end.
    let mut lines: std::collections::HashMap<RequestId, usize> = std::collections::HashMap::new();
    for (line, text) in std::io::stdin().lock().lines().enumerate() {
        let text = text?;
        if text.trim().is_empty() {
            continue;
        }
        let submitted = serde_json::from_str::<Request>(&text)
            .map_err(|error| error.to_string())
            .and_then(|request| engine.submit(request).map_err(|error| error.to_string()));
        match submitted {
            Ok(id) => drop(lines.insert(id, line)),
            Err(error) => writeln!(out, "{}", json!({"line": line, "error": error}))?,
        }
    }
    loop {
        let step = engine.step()?;
        for output in &step.outputs {
            write_completions(&mut out, lines[&output.request], output)?;
        }
        if step.is_idle() {
            break;
        }
    }
    Ok(out.flush()?)
}

fn write_completions(out: &mut impl Write, line: usize, output: &RequestOutput) -> std::io::Result<()> {
    for completion in &output.completions {
        let mut object = json!({
            "line": line,
            "id": output.id,
            "index": completion.index,
            "tokens": completion.tokens,
            "logprobs": completion.logprobs,
            "finish_reason": completion.finish_reason.as_str(),
            "cached_tokens": completion.cached_tokens,
            "seed": completion.seed,
            "version": completion.versions.last().map(|span| span.version.to_string()),
        });
        let mut set = |name: &str, value: serde_json::Value| drop(object[name] = value);
        if let Some(logprobs) = &output.prompt_logprobs {
            set("prompt_logprobs", json!(logprobs));
        }
        if let Some(logprobs) = &completion.processed_logprobs {
            set("processed_logprobs", json!(logprobs));
        }
        if let Some(top) = &completion.top_logprobs {
            let pairs = |list: &Vec<dormouse::TokenLogprob>| {
                json!(list.iter().map(|t| (t.token, t.logprob)).collect::<Vec<_>>())
            };
            set("top_logprobs", top.iter().map(pairs).collect());
        }
        if let Some(kept) = &completion.kept {
            set("kept", json!(kept));
        }
        if let FinishReason::Error(error) = &completion.finish_reason {
            set("error", json!(error.to_string()));
        }
        writeln!(out, "{object}")?;
    }
    Ok(())
}
