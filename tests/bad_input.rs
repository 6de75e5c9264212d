//! Promise 6: whatever a user passes wrong is a typed error that names it, never a panic, a hang or absurd
//! memory, and those next to it are unaffected.

#![allow(clippy::unwrap_used, reason = "a step of a test's setup that fails, fails the test")]

mod common;
#[path = "common/exact.rs"]
mod exact;

use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use crate::common::{awake, encode, fresh, on_device, prompt, tiny_builder, tiny_config, tiny_weights};
use dormouse::{
    Awake, CompletionError, DType, Engine, EngineBuilder, FinishReason, GenerateError, KvCapacity, Request,
    RequestError, RequestOutput, SafetensorsBytes,
};
use exact::assert_same;
use proptest::prelude::*;

fn tiny() -> Engine<Awake> {
    awake(tiny_builder(false, DType::F32), &tiny_weights(false, DType::F32, 1))
}

fn healthy() -> Vec<Request> {
    (0..3).map(|i| Request::new(prompt(5, i)).seed(i.into()).max_new_tokens(8)).collect()
}

fn healthy_outputs() -> Vec<RequestOutput> {
    let weights = tiny_weights(false, DType::F32, 1);
    healthy().iter().map(|request| fresh(&weights, false, request)).collect()
}

/// Requests that are refused, with what the refusal says. The engine: vocabulary 64, context 256.
fn bad_requests() -> Vec<(Request, &'static str)> {
    let good = || Request::new(vec![1, 2, 3]).max_new_tokens(4);
    vec![
        (Request::new(vec![]), "the prompt is empty"),
        (Request::new(vec![1, 64]), "token 64 at index 1 of prompt is outside the vocabulary of 64"),
        (Request::new(vec![u32::MAX]), "token 4294967295 at index 0 of prompt"),
        (Request::new(vec![1; 257]), "257 prompt tokens and 16 new ones exceed max_model_len 256"),
        (Request::new(vec![1; 1 << 20]), "1048576 prompt tokens"),
        (good().max_new_tokens(254), "3 prompt tokens and 254 new ones exceed max_model_len 256"),
        (good().max_new_tokens(usize::MAX), "18446744073709551615 new ones"),
        (good().max_new_tokens(0), "max_new_tokens is 0 and prompt_logprobs is off: nothing to do"),
        (good().min_new_tokens(5), "min_new_tokens 5 exceeds max_new_tokens 4"),
        (good().samples(0), "n is 0, not 1 to 1024"),
        (good().samples(usize::MAX), "n is 18446744073709551615, not 1 to 1024"),
        (good().temperature(f32::NAN), "temperature is NaN"),
        (good().temperature(f32::INFINITY), "temperature is inf"),
        (good().temperature(-0.1), "temperature is -0.1"),
        (good().top_p(0.0), "top_p is 0"),
        (good().top_p(1.1), "top_p is 1.1"),
        (good().top_p(f32::NAN), "top_p is NaN"),
        (good().min_p(-1.0), "min_p is -1"),
        (good().min_p(f32::NAN), "min_p is NaN"),
        (good().repetition_penalty(0.0), "repetition_penalty is 0"),
        (good().repetition_penalty(f32::NAN), "repetition_penalty is NaN"),
        (good().presence_penalty(f32::INFINITY), "presence_penalty is inf"),
        (good().frequency_penalty(f32::NAN), "frequency_penalty is NaN"),
        (good().top_logprobs(257), "top_logprobs is 257, more than 256"),
        (good().stop_token_ids(vec![1; 1_000_000]), "stop_token_ids has 1000000 entries, more than 4096"),
        (good().stop_token_ids(vec![64]), "token 64 at index 0 of stop_token_ids"),
        (
            good().stop_sequences(vec![vec![1]; 1_000_000]),
            "stop_sequences has 1000000 entries, more than 256",
        ),
        (good().stop_sequences(vec![vec![1], vec![]]), "stop sequence 1 has 0 tokens, not 1 to 256"),
        (good().stop_sequences(vec![vec![1; 257]]), "stop sequence 0 has 257 tokens, not 1 to 256"),
        (good().stop_sequences(vec![vec![1, 99]]), "token 99 at index 1 of stop_sequences"),
        (good().logit_bias(vec![(0, 0.0); 5000]), "logit_bias has 5000 entries, more than 4096"),
        (good().logit_bias(vec![(64, 0.0)]), "token 64 at index 0 of logit_bias"),
        (good().logit_bias(vec![(3, f32::NAN)]), "logit_bias of token 3 is NaN"),
        (good().logit_bias(vec![(3, f32::INFINITY)]), "logit_bias of token 3 is inf"),
        (good().allowed_tokens(vec![]), "allowed_token_ids is empty"),
        (good().allowed_tokens(vec![64]), "token 64 at index 0 of allowed_token_ids"),
        (good().allowed_tokens(vec![1; 1_000_000]), "allowed_token_ids has 1000000 entries, more than 64"),
        (good().cache_salt("s".repeat(257)), "cache_salt has 257 bytes, more than 256"),
        (good().id("i".repeat(257)), "id has 257 bytes, more than 256"),
    ]
}

/// B39: each of them is refused, by every door, next to three healthy requests that notice nothing.
#[test]
fn b39_bad_requests_next_to_healthy_ones() {
    let engine = tiny();
    let expected = healthy_outputs();
    for (bad, says) in bad_requests() {
        let ids: Vec<_> = healthy().into_iter().map(|request| engine.submit(request).unwrap()).collect();
        let error = engine.submit(bad.clone()).expect_err(says);
        assert!(error.to_string().contains(says), "{error}, expected: {says}");
        let mut batch = healthy();
        batch.insert(1, bad.clone());
        match engine.generate(&batch) {
            Err(GenerateError::Request { index: 1, source }) => {
                // By text: NaN is not equal to itself.
                assert_eq!(source.to_string(), error.to_string());
            }
            other => panic!("{other:?}, expected: {says}"),
        }
        let mut session = engine.session();
        assert!(session.generate(&bad).is_err(), "{says}");
        assert!(session.tokens().is_empty());
        drop(session);
        let mut outputs = Vec::new();
        while outputs.len() < ids.len() {
            outputs.extend(engine.step().unwrap().outputs);
        }
        outputs.sort_by_key(|output| output.request);
        assert_same(says, &outputs, &expected);
    }
    assert_eq!(engine.stats().blocks_owned, 0);
}

#[test]
fn scores_of_nothing_and_of_one_token() {
    let engine = tiny();
    assert_eq!(engine.score::<Vec<u32>>(&[]).unwrap(), Vec::<Vec<f32>>::new());
    assert_eq!(engine.score(&[[5]]).unwrap(), [Vec::<f32>::new()]);
    assert_eq!(engine.generate(&[]).unwrap(), []);
    let error = engine.score(&[vec![1, 2], vec![]]).unwrap_err();
    assert!(
        matches!(error, GenerateError::Request { index: 1, source: RequestError::EmptyPrompt }),
        "{error}"
    );
    let error = engine.score(&[vec![1; 257]]).unwrap_err();
    assert!(matches!(error, GenerateError::Request { index: 0, .. }), "{error}");
    // As long as the context: nothing is to be sampled after it.
    assert_eq!(engine.score(&[vec![1; 256]]).unwrap()[0].len(), 255);
}

/// B54: one live request for each id that a caller chose.
#[test]
fn b54_duplicate_ids() {
    let engine = tiny();
    let request = |i: usize| healthy().swap_remove(i).id("x");
    let expected = healthy_outputs();
    for round in 0..3 {
        let first = engine.submit(request(0)).unwrap();
        for i in 0..1000 {
            let error = engine.submit(request(i % 3)).unwrap_err();
            assert_eq!(error, RequestError::DuplicateId { id: "x".into() });
            assert_eq!(error.to_string(), "a live request has the id \"x\"");
            if i == 500 {
                engine.step().unwrap();
            }
        }
        assert_eq!(engine.find("x"), Some(first), "the first is unaffected");
        let twice = engine.generate(&[healthy().remove(1).id("y"), healthy().remove(2).id("y")]);
        assert!(matches!(twice, Err(GenerateError::Request { index: 1, .. })), "{twice:?}");
        assert_eq!(engine.find("y"), None, "the first of a refused call is forgotten");
        let output = loop {
            if let Some(output) = engine.step().unwrap().outputs.pop() {
                break output;
            }
        };
        assert_eq!((output.id.as_deref(), output.request), (Some("x"), first));
        assert_same(&format!("round {round}"), &[output], &expected[..1]);
        assert_eq!(engine.find("x"), None, "free again after the end");
    }
    let id = engine.submit(request(0)).unwrap();
    assert_eq!(engine.abort(&[id, id]).outputs.len(), 1, "an id given twice is aborted once");
    assert_eq!(engine.abort(&[id]).outputs.len(), 0);
    engine.submit(request(0)).unwrap();
    assert_eq!(engine.abort_all().aborted.len(), 1);
}

fn options() -> EngineBuilder {
    on_device(EngineBuilder::from_config(tiny_config(true)))
        .dtype(DType::F32)
        .kv_cache(KvCapacity::Blocks(8))
        .threads(1)
}

#[test]
fn bad_builder_options() {
    let cases = [
        (options().block_size(0), "block_size is 0, but it must be 1 to 65536"),
        (options().block_size(usize::MAX), "block_size is 18446744073709551615"),
        (options().max_num_seqs(0), "max_num_seqs is 0"),
        (options().max_num_seqs(usize::MAX), "max_num_seqs is 18446744073709551615"),
        (options().max_num_batched_tokens(0), "max_num_batched_tokens is 0"),
        (options().max_num_batched_tokens(usize::MAX), "max_num_batched_tokens is 18446744073709551615"),
        (options().max_model_len(0), "max_model_len is 0"),
        (options().max_model_len(513), "max_model_len is 513"),
        (options().kv_cache(KvCapacity::Tokens(64)).max_model_len(65), "the KV cache must hold a sequence"),
        (options().max_model_len(usize::MAX), "max_model_len is 18446744073709551615"),
        (options().threads(0), "threads is 0"),
        (options().threads(1_000_000), "threads is 1000000, but it must be 1 to 1024"),
        (options().kv_cache(KvCapacity::Blocks(0)), "the KV cache may take 0 bytes"),
        (options().kv_cache(KvCapacity::Tokens(0)), "the KV cache may take 0 bytes"),
        (options().kv_cache(KvCapacity::Bytes(0)), "the KV cache may take 0 bytes"),
        (options().kv_cache(KvCapacity::Bytes(1023)), "1023 bytes, one block of 16 tokens takes 4096"),
        (options().kv_cache(KvCapacity::Blocks(usize::MAX)), "kv_cache is 18446744073709551615"),
        (options().kv_cache(KvCapacity::Tokens(usize::MAX)), "kv_cache is"),
        (options().kv_cache(KvCapacity::Bytes(u64::MAX)), "kv_cache is 4503599627370495"),
        (EngineBuilder::from_config(tiny_config(true)).max_num_seqs(0), "max_num_seqs is 0"),
    ];
    for (builder, says) in cases {
        let begin = Instant::now();
        let error = builder.build_asleep().expect_err(says).to_string();
        assert!(error.contains(says), "{error}, expected: {says}");
        assert!(begin.elapsed() < Duration::from_secs(5), "{says}: {:?}", begin.elapsed());
    }
    let error = options().build().unwrap_err().to_string();
    assert!(error.starts_with("an engine without a checkpoint can only be built asleep"), "{error}");
}

/// A cache or a limit that the machine cannot give fails at the wake, typed, and the engine is handed back.
#[test]
fn more_memory_than_there_is() {
    let weights = tiny_weights(true, DType::F32, 1);
    let cases = [
        options().block_size(1 << 10).kv_cache(KvCapacity::Bytes(100 << 40)).max_num_batched_tokens(16),
        options().memory_limit_bytes(200 << 10).max_num_batched_tokens(1 << 12),
    ];
    for builder in cases {
        let Ok(asleep) = builder.build_asleep() else { continue };
        let failed = asleep.load_weights(weights.source()).unwrap().wake_up().unwrap_err();
        assert!(failed.error.to_string().contains("bytes"), "{}", failed.error);
        let again = failed.engine.wake_up().unwrap_err();
        assert!(!again.error.to_string().is_empty());
    }
    let failed = options().memory_limit_bytes(0).build_asleep().unwrap().load_weights(weights.source());
    let text = failed.unwrap_err().error.to_string();
    assert!(text.contains("weights") && text.contains("0 "), "{text}");
}

fn family(name: &str) -> PathBuf {
    PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("tests/families").join(name)
}

/// A copy of a family's directory, to be spoilt.
fn copy_of(name: &str) -> tempfile::TempDir {
    let directory = tempfile::tempdir().unwrap();
    for entry in std::fs::read_dir(family(name)).unwrap() {
        let path = entry.unwrap().path();
        std::fs::copy(&path, directory.path().join(path.file_name().unwrap())).unwrap();
    }
    directory
}

fn small(directory: &Path) -> EngineBuilder {
    on_device(Engine::builder(directory)).kv_cache(KvCapacity::Blocks(16)).block_size(4).threads(1)
}

/// What building on a spoilt copy says, with the directory's own path cut to `DIR`.
fn fault(name: &str, spoil: impl FnOnce(&Path)) -> String {
    let directory = copy_of(name);
    spoil(directory.path());
    let begin = Instant::now();
    let error = small(directory.path()).build().expect_err("spoilt").to_string();
    assert!(begin.elapsed() < Duration::from_secs(5), "{error}: {:?}", begin.elapsed());
    error.replace(&directory.path().display().to_string(), "DIR")
}

fn edit_config(directory: &Path, from: &str, to: &str) {
    let path = directory.join("config.json");
    let text = std::fs::read_to_string(&path).unwrap();
    assert!(text.contains(from), "{from} is there");
    std::fs::write(path, text.replacen(from, to, 1)).unwrap();
}

#[test]
fn bad_directories() {
    let says = |error: String, parts: &[&str]| {
        assert!(parts.iter().all(|part| error.contains(part)), "{error}, expected: {parts:?}");
    };
    let remove = |file: &'static str| move |dir: &Path| std::fs::remove_file(dir.join(file)).unwrap();
    let replace_by_directory = |file: &'static str| {
        move |dir: &Path| {
            std::fs::remove_file(dir.join(file)).unwrap();
            std::fs::create_dir(dir.join(file)).unwrap();
        }
    };
    let link = |file: &'static str, to: &'static str| {
        move |dir: &Path| {
            std::fs::remove_file(dir.join(file)).unwrap();
            std::os::unix::fs::symlink(to, dir.join(file)).unwrap();
        }
    };
    let missing = small(Path::new("/nowhere/at/all")).build().unwrap_err().to_string();
    says(missing, &["/nowhere/at/all/config.json", "No such file"]);
    let file = small(&family("llama2").join("config.json")).build().unwrap_err().to_string();
    says(file, &["config.json/config.json", "Not a directory"]);
    says(fault("llama2", remove("config.json")), &["DIR/config.json", "No such file"]);
    says(fault("llama2", remove("model.safetensors")), &["DIR: no model.safetensors and no"]);
    says(fault("llama2", replace_by_directory("config.json")), &["DIR/config.json", "not a regular file"]);
    says(
        fault("llama2", replace_by_directory("model.safetensors")),
        &["DIR/model.safetensors", "not a regular file"],
    );
    says(fault("llama2", link("config.json", "/dev/zero")), &["DIR/config.json", "not a regular file"]);
    // Outside the directory, or not a regular file: either is reason enough.
    says(fault("llama2", link("model.safetensors", "/dev/zero")), &["DIR/model.safetensors"]);
    says(fault("llama2", link("model.safetensors", "nothing")), &["DIR/model.safetensors"]);
    says(
        fault("llama_linear_sharded", remove("model-00002-of-00003.safetensors")),
        &["DIR/model-00002-of-00003.safetensors", "No such file"],
    );
    says(
        fault("llama_linear_sharded", |dir| {
            std::fs::write(dir.join("model.safetensors.index.json"), "{\"weight_map\": 3").unwrap();
        }),
        &["DIR/model.safetensors.index.json", "line 1"],
    );
}

/// B36: names in an index are file names, nothing more.
#[test]
fn b36_shard_names() {
    let long = "x".repeat(5000);
    let outside = tempfile::tempdir().unwrap();
    std::fs::copy(family("llama2").join("model.safetensors"), outside.path().join("x.safetensors")).unwrap();
    let absolute = outside.path().join("x.safetensors").display().to_string();
    for name in ["../x", "a/../../x", "", ".", "..", "x\\u0000y", &long, &absolute] {
        let error = fault("llama_linear_sharded", |dir| {
            let index = dir.join("model.safetensors.index.json");
            let text = std::fs::read_to_string(&index).unwrap();
            std::fs::write(index, text.replace("model-00002-of-00003.safetensors", name)).unwrap();
        });
        let named =
            error.contains("is not a plain file name") && error.contains("DIR/model.safetensors.index");
        // A plain name of 5000 characters is one that the file system refuses.
        assert!(named || (name == long && error.len() < 6000), "{name:?}: {error}");
    }
    let error = fault("llama_linear_sharded", |dir| {
        let shard = dir.join("model-00002-of-00003.safetensors");
        std::fs::remove_file(&shard).unwrap();
        std::os::unix::fs::symlink(&absolute, shard).unwrap();
    });
    assert!(error.contains("outside the checkpoint"), "{error}");
}

/// B37, B38, B41, B42: what a safetensors header can claim.
#[test]
fn b37_b38_b42_lying_headers() {
    let spoil = |edit: &dyn Fn(&mut Vec<u8>)| {
        fault("llama2", |dir| {
            let path = dir.join("model.safetensors");
            let mut bytes = std::fs::read(&path).unwrap();
            edit(&mut bytes);
            std::fs::write(path, bytes).unwrap();
        })
    };
    let header = |from: &'static str, to: &'static str| {
        assert!(from.len() >= to.len());
        spoil(&move |bytes| {
            let length = u64::from_le_bytes(bytes[..8].try_into().unwrap()) as usize;
            let text = String::from_utf8(bytes[8..8 + length].to_vec()).unwrap();
            assert!(text.contains(from), "{from} is in {text}");
            let mut text = text.replacen(from, to, 1).into_bytes();
            text.resize(length, b' ');
            bytes[8..8 + length].copy_from_slice(&text);
        })
    };
    let mut faults = vec![
        spoil(&|bytes| bytes[..8].copy_from_slice(&u64::MAX.to_le_bytes())),
        spoil(&|bytes| bytes[..8].copy_from_slice(&(2u64 << 30).to_le_bytes())),
        spoil(&|bytes| bytes[..8].fill(0)),
        spoil(&|bytes| bytes.extend_from_slice(b"more")),
        spoil(&|bytes| bytes[8] = b'['),
        header("\"dtype\":\"BF16\"", "\"dtype\":\"XYZ\""),
        header("\"dtype\":\"BF16\"", "\"dtype\":\"\""),
        header("\"data_offsets\":[0,", "\"data_offsets\":[9,"),
        header("model.norm.weight", "lm_head.weight"),
    ];
    faults.extend([0, 4, 8, 100, 20_000].map(|len| spoil(&move |bytes| bytes.truncate(len))));
    faults.push(spoil(&|bytes| {
        bytes.pop();
    }));
    for fault in faults {
        // An element type that no weight has is the tensor's fault, not the file's.
        let tensor = fault.contains("unsupported dtype: lm_head.weight");
        assert!(tensor || fault.contains("DIR/model.safetensors"), "{fault}");
        assert!(fault.len() < 2000, "{fault}");
    }
}

/// B40: a shard that a download left short.
#[test]
fn b40_truncated_shards() {
    let shard = "model-00002-of-00003.safetensors";
    let bytes = std::fs::read(family("llama_linear_sharded").join(shard)).unwrap();
    let header = 8 + u64::from_le_bytes(bytes[..8].try_into().unwrap()) as usize;
    for len in [0, 4, 8, header - 1, header, usize::midpoint(header, bytes.len()), bytes.len() - 1] {
        let error =
            fault("llama_linear_sharded", |dir| std::fs::write(dir.join(shard), &bytes[..len]).unwrap());
        assert!(error.contains("truncated") && error.contains(&format!("DIR/{shard}")), "{len}: {error}");
    }
}

/// B41: data at odd offsets of a file, and at odd addresses.
#[test]
fn b41_unaligned_data() {
    let digest = |directory: &Path| small(directory).build().unwrap().version().digest;
    let aligned = digest(&family("llama2"));
    for padding in [1, 3, 5] {
        let directory = copy_of("llama2");
        let path = directory.path().join("model.safetensors");
        let mut bytes = std::fs::read(&path).unwrap();
        let length = u64::from_le_bytes(bytes[..8].try_into().unwrap());
        bytes[..8].copy_from_slice(&(length + padding).to_le_bytes());
        let end = 8 + length as usize;
        bytes.splice(end..end, vec![b' '; padding as usize]);
        std::fs::write(&path, &bytes).unwrap();
        assert_eq!(digest(directory.path()), aligned, "{padding} bytes off");
        let shifted = [vec![0; padding as usize], bytes].concat();
        let source = SafetensorsBytes::new(&shifted[padding as usize..]);
        let loaded = small(directory.path()).build_asleep().unwrap().load_weights(source).unwrap();
        assert_eq!(loaded.report().version.digest, aligned, "{padding} bytes off in memory");
    }
}

#[test]
fn config_and_weights_disagree() {
    let cases = [
        ("\"num_hidden_layers\": 2", "\"num_hidden_layers\": 3", "model.layers.2."),
        ("\"num_hidden_layers\": 2", "\"num_hidden_layers\": 1", "model.layers.1."),
        ("\"vocab_size\": 128", "\"vocab_size\": 127", "model.embed_tokens.weight"),
        ("\"intermediate_size\": 24", "\"intermediate_size\": 25", "gate_proj"),
        ("\"tie_word_embeddings\": false", "\"attention_bias\": true", "q_proj.bias"),
    ];
    for (from, to, names) in cases {
        let error = fault("llama2", |dir| edit_config(dir, from, to));
        assert!(error.contains(names), "{to}: {error}");
    }
}

/// Numbers that claim terabytes: an error that names the field, at once.
#[test]
fn huge_numbers_in_the_config() {
    let cases = [
        ("\"hidden_size\": 32", "\"hidden_size\": 1e300", "hidden_size"),
        ("\"hidden_size\": 32", "\"hidden_size\": 18446744073709551615", "hidden_size"),
        ("\"hidden_size\": 32", "\"hidden_size\": 131072", ""),
        ("\"hidden_size\": 32", "\"hidden_size\": 0", "hidden_size"),
        ("\"hidden_size\": 32", "\"hidden_size\": -32", "hidden_size"),
        ("\"num_hidden_layers\": 2", "\"num_hidden_layers\": 4294967296", "num_hidden_layers"),
        ("\"num_hidden_layers\": 2", "\"num_hidden_layers\": 4096", ""),
        ("\"intermediate_size\": 24", "\"intermediate_size\": 1048576", ""),
        ("\"vocab_size\": 128", "\"vocab_size\": 4194304", ""),
        ("\"vocab_size\": 128", "\"vocab_size\": 99999999999", "vocab_size"),
        ("\"num_attention_heads\": 4", "\"num_attention_heads\": 3", "num_attention_heads"),
        ("\"max_position_embeddings\": 256", "\"max_position_embeddings\": 1e12", "max_position_embeddings"),
    ];
    for (from, to, names) in cases {
        let error = fault("llama2", |dir| edit_config(dir, from, to));
        assert!(error.contains(names) && error.len() < 20_000, "{to}: {error}");
    }
    // Without weights only address space is taken.
    let directory = copy_of("llama2");
    std::fs::remove_file(directory.path().join("model.safetensors")).unwrap();
    edit_config(directory.path(), "\"hidden_size\": 32", "\"hidden_size\": 131072");
    edit_config(directory.path(), "\"num_attention_heads\": 4", "\"num_attention_heads\": 4096");
    edit_config(directory.path(), "\"vocab_size\": 128", "\"vocab_size\": 4194304");
    edit_config(directory.path(), "\"intermediate_size\": 24", "\"intermediate_size\": 1048576");
    let begin = Instant::now();
    if let Err(error) = small(directory.path()).build_asleep() {
        assert!(error.to_string().contains("bytes"), "{error}");
    }
    assert!(begin.elapsed() < Duration::from_secs(5), "{:?}", begin.elapsed());
    // A context of a milliard tokens costs nothing until it is used.
    let directory = copy_of("llama2");
    let positions = "\"max_position_embeddings\": 1073741824";
    edit_config(directory.path(), "\"max_position_embeddings\": 256", positions);
    let engine = small(directory.path()).build().unwrap();
    assert_eq!(engine.limits().max_model_len, 64, "what the cache holds");
}

/// Weights that are not numbers: the completions say so, the score says so, and the engine goes on.
#[test]
fn weights_full_of_rubbish() {
    let good = tiny_weights(false, DType::F32, 1);
    for value in [f32::NAN, f32::INFINITY, f32::NEG_INFINITY] {
        let mut bad = good.clone();
        for (_, tensor) in &mut bad.0 {
            let len = tensor.shape.iter().product();
            *tensor = encode(DType::F32, tensor.shape.clone(), vec![value; len]);
        }
        let mut engine = awake(tiny_builder(false, DType::F32), &bad);
        let requests = [healthy().remove(0), healthy().remove(1).samples(3).prompt_logprobs(true)];
        for output in engine.generate(&requests).unwrap() {
            for completion in &output.completions {
                let FinishReason::Error(CompletionError::NonFiniteLogits { position }) =
                    completion.finish_reason
                else {
                    panic!("{value}: {completion:?}")
                };
                assert!((1..=5).contains(&position), "{value}: {position}");
                assert!(completion.tokens.is_empty());
            }
        }
        let error = engine.score(&[[1, 2, 3]]).unwrap_err();
        assert_eq!(error.to_string(), "sequence 0: the logits at position 1 are not finite");
        let stats = engine.stats();
        assert_eq!((stats.live_requests, stats.blocks_owned), (0, 0), "{value}");
        let asleep = engine.sleep(Default::default()).unwrap();
        engine = asleep.load_weights(good.source()).unwrap().wake_up().unwrap();
        assert_same("good again", &engine.generate(&healthy()).unwrap(), &healthy_outputs());
    }
}

/// Finite weights whose products overflow: each completion has finite logprobs or fails by name.
#[test]
fn weights_that_overflow() {
    let good = tiny_weights(false, DType::F32, 1);
    let mut failed = 0;
    for (factor, only) in [(1e38, ""), (1e30, ""), (1e38, "lm_head"), (1e38, "v_proj"), (1e20, "layers.0")] {
        let mut bad = good.clone();
        for (_, tensor) in bad.0.iter_mut().filter(|(name, _)| name.contains(only)) {
            let values = tensor.data.chunks_exact(4).map(|v| f32::from_le_bytes([v[0], v[1], v[2], v[3]]));
            *tensor = encode(DType::F32, tensor.shape.clone(), values.map(|v| v * factor).collect());
        }
        let engine = awake(tiny_builder(false, DType::F32), &bad);
        for output in engine.generate(&healthy()).unwrap() {
            let completion = &output.completions[0];
            assert!(completion.logprobs.iter().all(|logprob| logprob.is_finite()), "{only}: {completion:?}");
            match &completion.finish_reason {
                FinishReason::Error(CompletionError::NonFiniteLogits { .. }) => failed += 1,
                FinishReason::Stop { .. } | FinishReason::Length => {}
                other => panic!("{only}: {other:?}"),
            }
        }
        assert_eq!(engine.stats().blocks_owned, 0);
    }
    assert!(failed > 0, "some must overflow");
}

/// One token's embedding is NaN: whoever has it fails, its neighbours and those who get its blocks do not.
#[test]
fn rubbish_stays_with_its_request() {
    let mut weights = tiny_weights(false, DType::F32, 1);
    let embedding = weights.0.iter_mut().find(|(name, _)| name.contains("embed_tokens")).unwrap();
    embedding.1.data[63 * 32 * 4..].chunks_exact_mut(4).for_each(|value| {
        value.copy_from_slice(&f32::NAN.to_le_bytes());
    });
    // They never meet that token: not in the prompt, and they don't draw it.
    let healthy: Vec<Request> =
        healthy().into_iter().map(|request| request.logit_bias(vec![(63, f32::NEG_INFINITY)])).collect();
    assert!(healthy.iter().all(|request| !request.prompt.contains(&63)));
    let good = tiny_weights(false, DType::F32, 1);
    let expected: Vec<RequestOutput> = healthy.iter().map(|request| fresh(&good, false, request)).collect();
    let poisoned = || Request::new(vec![1, 2, 3, 4, 5, 6, 63, 1, 2]).prompt_logprobs(true);
    for blocks in [8, 64] {
        let engine = awake(tiny_builder(false, DType::F32).kv_cache(KvCapacity::Blocks(blocks)), &weights);
        for _ in 0..3 {
            let mut batch = healthy.clone();
            batch.insert(1, poisoned());
            let mut outputs = engine.generate(&batch).unwrap();
            let failed = outputs.remove(1);
            assert_eq!(
                failed.completions[0].finish_reason,
                FinishReason::Error(CompletionError::NonFiniteLogits { position: 7 })
            );
            assert_eq!(failed.prompt_logprobs.unwrap().len(), 6, "those before it are there");
            for (got, expected) in outputs.iter().zip(&expected) {
                assert_eq!(crate::common::bits(got), crate::common::bits(expected));
            }
        }
    }
}

/// Builds and uses an engine on a directory of which one file was spoilt: no panic, no hang.
fn survive(directory: &Path) {
    let begin = Instant::now();
    if let Ok(engine) = small(directory).build() {
        let request = Request::new(vec![1, 2, 3]).seed(1).max_new_tokens(3);
        let output = engine.generate(std::slice::from_ref(&request));
        if engine.limits().max_model_len >= 6 && engine.limits().vocab_size > 3 {
            assert_eq!(output.expect("a valid request").len(), 1);
        }
    }
    assert!(begin.elapsed() < Duration::from_secs(10), "{:?}", begin.elapsed());
}

const FAMILIES: [&str; 8] =
    ["llama2", "llama3", "smollm2", "mistral", "qwen2", "qwen2_yarn", "qwen3", "llama_linear_sharded"];

/// A JSON value, mostly of the wrong kind.
fn any_json() -> impl Strategy<Value = String> {
    let number = any::<f64>().prop_filter("JSON", |value| value.is_finite()).prop_map(|v| v.to_string());
    let leaf = prop_oneof![
        Just("null".to_owned()),
        any::<bool>().prop_map(|value| value.to_string()),
        any::<i128>().prop_map(|value| value.to_string()),
        (-2..70i64).prop_map(|value| value.to_string()),
        number,
        Just("1e999".to_owned()),
        Just("-0".to_owned()),
        "[a-z0-9]{0,4}".prop_map(|text| format!("{text:?}")),
    ];
    leaf.prop_recursive(4, 24, 4, |inner| {
        prop_oneof![
            prop::collection::vec(inner.clone(), 0..4).prop_map(|list| format!("[{}]", list.join(","))),
            prop::collection::vec(("[a-z0-9]{1,3}", inner), 0..3).prop_map(|map| {
                let entries: Vec<String> = map.iter().map(|(key, v)| format!("{key:?}:{v}")).collect();
                format!("{{{}}}", entries.join(","))
            }),
        ]
    })
}

const FIELDS: [&str; 24] = [
    "prompt",
    "id",
    "cache_salt",
    "resume",
    "n",
    "max_new_tokens",
    "max_tokens",
    "min_new_tokens",
    "temperature",
    "top_k",
    "top_p",
    "min_p",
    "seed",
    "stop_token_ids",
    "stop_sequences",
    "ignore_eos",
    "repetition_penalty",
    "presence_penalty",
    "frequency_penalty",
    "logit_bias",
    "allowed_token_ids",
    "logprobs",
    "top_logprobs",
    "prompt_logprobs",
];

thread_local! {
    static ENGINE: Engine<Awake> = tiny();
}

proptest! {
    #![proptest_config(ProptestConfig { cases: crate::common::cases(1000), ..ProptestConfig::default() })]

    #[test]
    fn mutated_config(
        family in 0..FAMILIES.len(),
        edits in prop::collection::vec((any::<prop::sample::Index>(), any::<u8>(), 0..3u8), 1..4),
    ) {
        let directory = copy_of(FAMILIES[family]);
        let path = directory.path().join("config.json");
        let mut bytes = std::fs::read(&path).unwrap();
        for (index, byte, kind) in edits {
            let at = index.index(bytes.len());
            match kind {
                0 => bytes[at] = byte,
                // Digits and signs make other valid numbers.
                1 => bytes[at] = b"0123456789.-eE\",:{}[]"[usize::from(byte) % 21],
                _ => bytes.insert(at, b"0123456789"[usize::from(byte) % 10]),
            }
        }
        std::fs::write(path, bytes).unwrap();
        survive(directory.path());
    }

    #[test]
    fn mutated_weights(
        family in 0..FAMILIES.len(),
        edits in prop::collection::vec((any::<prop::sample::Index>(), any::<u8>()), 1..4),
        in_header in any::<bool>(),
        cut in prop::option::weighted(0.1, any::<prop::sample::Index>()),
    ) {
        let directory = copy_of(FAMILIES[family]);
        let shards = ["model.safetensors", "model-00002-of-00003.safetensors"];
        let path = shards.map(|shard| directory.path().join(shard)).into_iter().find(|p| p.exists()).unwrap();
        let mut bytes = std::fs::read(&path).unwrap();
        let header = 8 + u64::from_le_bytes(bytes[..8].try_into().unwrap()) as usize;
        for (index, byte) in edits {
            let at = index.index(if in_header { header } else { bytes.len() });
            bytes[at] = byte;
        }
        if let Some(cut) = cut {
            bytes.truncate(cut.index(bytes.len()));
        }
        std::fs::write(path, bytes).unwrap();
        survive(directory.path());
    }

    #[test]
    fn random_json_requests(fields in prop::collection::vec((0..FIELDS.len(), any_json()), 0..6)) {
        let entries = fields.iter().map(|(field, value)| format!("{:?}:{value}", FIELDS[*field]));
        let text = format!("{{\"prompt\":[1,2],{}\"min_p\":0}}", entries.map(|e| e + ",").collect::<String>());
        for text in [text.clone(), text.replacen("\"prompt\":[1,2],", "", 1)] {
            if let Ok(request) = serde_json::from_str::<Request>(&text) {
                ENGINE.with(|engine| {
                    if engine.submit(request).is_ok() {
                        engine.step().unwrap();
                        assert_eq!(engine.abort_all().outputs.len(), 1, "it ended, once");
                    }
                });
            }
        }
    }
}

#[test]
fn wrong_json() {
    let cases = [
        (r#"{"prompt": [-1]}"#, "-1"),
        (r#"{"prompt": [4294967296]}"#, "4294967296"),
        (r#"{"prompt": [1.5]}"#, "1.5"),
        (r#"{"prompt": "text"}"#, "text"),
        (r#"{"prompt": null}"#, "null"),
        (r"{}", "prompt"),
        (r#"{"prompt": [1], "n": -1}"#, "-1"),
        (r#"{"prompt": [1], "n": 1e3}"#, "1000"),
        (r#"{"prompt": [1], "n": 99999999999999999999999}"#, "usize"),
        (r#"{"prompt": [1], "temperature": "hot"}"#, "hot"),
        (r#"{"prompt": [1], "top_k": -2}"#, "-2"),
        (r#"{"prompt": [1], "tempreature": 1}"#, "tempreature"),
        (r#"{"prompt": [1], "logit_bias": {"x": 1}}"#, "x"),
        (r#"{"prompt": [1], "stop_sequences": [1]}"#, "1"),
        (r#"{"prompt": [1], "n": 1, "n": 2}"#, "duplicate"),
        (r#"[1, 2]"#, ""),
    ];
    for (text, names) in cases {
        match serde_json::from_str::<Request>(text) {
            Ok(request) => panic!("{text} is {request:?}"),
            Err(error) => assert!(error.to_string().contains(names), "{text}: {error}"),
        }
    }
    // A number too large for f32 is infinity, which the engine refuses.
    let request = serde_json::from_str::<Request>(r#"{"prompt": [1], "temperature": 1e300}"#);
    if let Ok(request) = request {
        assert_eq!(
            ENGINE.with(|engine| engine.submit(request)).unwrap_err().to_string(),
            "temperature is inf, not finite and at least 0"
        );
    }
}
