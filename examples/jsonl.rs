//! For scripts and comparisons: one request per line on standard input, one completion per line on standard
//! output, in the order of the requests and of their samples. All requests are batched together.
//!
//! ```sh
//! echo '{"prompt": [1, 2], "max_new_tokens": 8, "temperature": 0}' \
//!     | cargo run --release --example jsonl -- --model DIR
//! ```
//!
//! A request has the fields of `Request` by their names; a line that is not a valid request gets a line with
//! `error`. Options: `--model DIR`, `--cuda N`, `--threads N`, `--kv-blocks N`, `--block-size N`, `--no-prefix-cache`,
//! `--max-batch N` (sequences in a step).

use std::collections::BTreeMap;
use std::error::Error;
use std::io::{BufRead, BufWriter, Write};

use dormouse::{Engine, EngineBuilder, FinishReason, KvCapacity, Request, RequestOutput, TokenLogprob};
use serde_json::{Value, json};

fn main() -> std::process::ExitCode {
    let Err(error) = run() else { return std::process::ExitCode::SUCCESS };
    eprintln!("jsonl: {error}");
    std::process::ExitCode::FAILURE
}

fn run() -> Result<(), Box<dyn Error>> {
    let engine = options()?.build()?;
    // By input line: what is ready to be printed. A request is here once it has ended.
    let mut ready: BTreeMap<usize, Vec<Value>> = BTreeMap::new();
    let mut lines = BTreeMap::new();
    // Bytes, not text: a line that is no UTF-8 is one bad line, and takes no other along.
    for (line, text) in std::io::stdin().lock().split(b'\n').enumerate() {
        let text = text?;
        let submitted = serde_json::from_slice::<Request>(&text)
            .map_err(|error| error.to_string())
            .and_then(|request| engine.submit(request).map_err(|error| error.to_string()));
        match submitted {
            Ok(id) => drop(lines.insert(id, line)),
            Err(_) if text.trim_ascii().is_empty() => drop(ready.insert(line, Vec::new())),
            Err(error) => drop(ready.insert(line, vec![json!({"line": line, "error": error})])),
        }
    }
    let mut out = BufWriter::new(std::io::stdout().lock());
    let mut next = 0;
    loop {
        let step = engine.step()?;
        for output in &step.outputs {
            let line = lines[&output.request];
            ready.insert(line, completions(line, output));
        }
        while let Some(values) = ready.remove(&next) {
            values.iter().try_for_each(|value| writeln!(out, "{value}"))?;
            next += 1;
        }
        if step.is_idle() {
            return Ok(out.flush()?);
        }
    }
}

fn options() -> Result<EngineBuilder, Box<dyn Error>> {
    let args: Vec<String> = std::env::args().skip(1).collect();
    let value = |name: &str| {
        let at = args.iter().position(|arg| arg == name)?;
        Some(args.get(at + 1).cloned().unwrap_or_default())
    };
    let number = |name: &str| -> Result<Option<usize>, String> {
        value(name)
            .map(|text| text.parse().map_err(|_| format!("{name} needs a number, not {text:?}")))
            .transpose()
    };
    let known =
        ["--model", "--cuda", "--threads", "--kv-blocks", "--block-size", "--max-batch", "--no-prefix-cache"];
    if let Some(unknown) = args.iter().find(|arg| arg.starts_with("--") && !known.contains(&arg.as_str())) {
        return Err(format!("unknown option {unknown}; there are {}", known.join(", ")).into());
    }
    let model =
        value("--model").unwrap_or_else(|| concat!(env!("CARGO_MANIFEST_DIR"), "/examples/model").to_owned());
    let mut builder = Engine::builder(model);
    if let Some(threads) = number("--threads")? {
        builder = builder.threads(threads);
    }
    if let Some(ordinal) = number("--cuda")? {
        builder = on_gpu(builder, ordinal)?;
    }
    if let Some(blocks) = number("--kv-blocks")? {
        builder = builder.kv_cache(KvCapacity::Blocks(blocks));
    }
    if let Some(tokens) = number("--block-size")? {
        builder = builder.block_size(tokens);
    }
    if let Some(sequences) = number("--max-batch")? {
        builder = builder.max_num_seqs(sequences);
    }
    Ok(builder.prefix_cache(!args.iter().any(|arg| arg == "--no-prefix-cache")))
}

#[cfg(feature = "cuda")]
fn on_gpu(builder: EngineBuilder, ordinal: usize) -> Result<EngineBuilder, Box<dyn Error>> {
    Ok(builder.cuda(ordinal.try_into()?))
}

#[cfg(not(feature = "cuda"))]
fn on_gpu(_: EngineBuilder, _: usize) -> Result<EngineBuilder, Box<dyn Error>> {
    Err("--cuda needs a build with the feature `cuda`".into())
}

fn completions(line: usize, output: &RequestOutput) -> Vec<Value> {
    let pairs = |list: &Vec<TokenLogprob>| -> Value {
        list.iter().map(|top| json!([top.token, top.logprob])).collect()
    };
    let object = |completion: &dormouse::Completion| {
        let mut object = json!({
            "line": line,
            "index": completion.index,
            "tokens": completion.tokens,
            "logprobs": completion.logprobs,
            "finish_reason": completion.finish_reason.as_str(),
            "cached_tokens": completion.cached_tokens,
            "seed": completion.seed,
            "version": completion.versions.last().map(|span| span.version.to_string()),
        });
        let mut set = |name: &str, value: Option<Value>| {
            if let Some(value) = value {
                object[name] = value;
            }
        };
        set("id", output.id.as_ref().map(|id| json!(id)));
        set("prompt_logprobs", output.prompt_logprobs.as_ref().map(|logprobs| json!(logprobs)));
        set("processed_logprobs", completion.processed_logprobs.as_ref().map(|logprobs| json!(logprobs)));
        set("kept", completion.kept.as_ref().map(|kept| json!(kept)));
        let top = completion.top_logprobs.as_ref();
        set("top_logprobs", top.map(|top| top.iter().map(pairs).collect()));
        if let FinishReason::Error(error) = &completion.finish_reason {
            set("error", Some(json!(error.to_string())));
        }
        object
    };
    output.completions.iter().map(object).collect()
}
