//! Promise 2: tokens and logprobs depend on weights, prompt, sampling parameters and seed only. Every test
//! compares all numbers of an output, as bits, with those of an engine that serves the request alone, in one
//! chunk, without a prefix cache.

mod common;
#[path = "common/exact.rs"]
mod exact;

use std::path::PathBuf;

use crate::common::{Weights, awake, on_device, prompt, tiny_builder, tiny_weights, weights_dtype};
use dormouse::{
    Awake, DType, Engine, EngineBuilder, FinishReason, KvCapacity, Request, RequestOutput, SimdPath,
    SleepOptions,
};
use exact::{assert_same, to_bits};

/// Where the weights come from.
enum Model {
    Tiny { tied: bool, weights: Weights },
    Family(PathBuf),
}

impl Model {
    fn tiny(tied: bool, dtype: DType) -> Self {
        Model::Tiny { tied, weights: tiny_weights(tied, dtype, 7) }
    }

    fn family(name: &str) -> Self {
        Model::Family(PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("tests/families").join(name))
    }

    /// An engine of 256 blocks of 4 tokens and one thread, but for what `adjust` changes.
    fn engine(&self, adjust: impl FnOnce(EngineBuilder) -> EngineBuilder) -> Engine<Awake> {
        let common = |builder: EngineBuilder| {
            adjust(builder.kv_cache(KvCapacity::Blocks(256)).block_size(4).threads(1))
        };
        match self {
            Model::Tiny { tied, weights } => {
                awake(common(tiny_builder(*tied, weights_dtype(weights))), weights)
            }
            Model::Family(directory) => {
                common(on_device(Engine::builder(directory))).build().expect("the checkpoint is valid")
            }
        }
    }

    /// Each request alone in a new engine.
    fn alone(&self, requests: &[Request]) -> Vec<RequestOutput> {
        let alone = |request: &Request| {
            let engine = self.engine(|builder| builder.prefix_cache(false));
            generate(&engine, std::slice::from_ref(request)).remove(0)
        };
        requests.iter().map(alone).collect()
    }
}

fn generate(engine: &Engine<Awake>, requests: &[Request]) -> Vec<RequestOutput> {
    engine.generate(requests).expect("valid requests")
}

/// Every kind of output and every sampling parameter, lengths on both sides of block and chunk borders.
fn requests() -> Vec<Request> {
    let shared = prompt(24, 3);
    let everything = |request: Request| {
        request.processed_logprobs(true).top_logprobs(5).return_kept_set(true).prompt_logprobs(true)
    };
    vec![
        Request::new(prompt(1, 1)).temperature(0.0).ignore_eos(true).max_new_tokens(12),
        everything(Request::new(prompt(17, 2)).seed(11).top_k(9).top_p(0.9).max_new_tokens(15)),
        Request::new(shared.clone()).samples(3).seed(5).ignore_eos(true).max_new_tokens(13),
        everything(Request::new([shared.clone(), prompt(5, 4)].concat()).seed(6).max_new_tokens(9)),
        Request::new(shared)
            .seed(7)
            .repetition_penalty(1.3)
            .presence_penalty(0.2)
            .frequency_penalty(0.3)
            .min_new_tokens(6)
            .stop_token_ids(vec![5, 6, 7, 8, 9, 10, 11, 12])
            .stop_sequences(vec![vec![20, 21], vec![30]])
            .max_new_tokens(20),
        everything(Request::new(prompt(33, 5)).max_new_tokens(0)),
        everything(
            Request::new(prompt(8, 6))
                .seed(8)
                .temperature(1.7)
                .min_p(0.01)
                .logit_bias(vec![(3, 2.5), (4, f32::NEG_INFINITY)])
                .allowed_tokens((1..50).collect::<Vec<_>>())
                .max_new_tokens(16),
        ),
        Request::new(prompt(16, 7)).seed(9).cache_salt("tenant").max_new_tokens(8),
    ]
}

type Adjust = fn(EngineBuilder) -> EngineBuilder;

macro_rules! settings {
    ($($builder:ident $adjust:expr),* $(,)?) => {
        [$((stringify!($adjust), (|$builder: EngineBuilder| $adjust) as Adjust)),*]
    };
}

/// Each of these must not change a bit.
fn settings() -> Vec<(&'static str, Adjust)> {
    settings![
        b b.max_num_batched_tokens(1),
        b b.max_num_batched_tokens(2),
        b b.max_num_batched_tokens(3),
        b b.max_num_batched_tokens(7),
        b b.max_num_batched_tokens(64),
        b b.max_num_batched_tokens(512),
        b b.max_num_seqs(1),
        b b.max_num_seqs(2),
        b b.max_num_seqs(5),
        b b.block_size(1),
        b b.block_size(2),
        b b.block_size(3),
        b b.block_size(16),
        b b.threads(2),
        b b.threads(3),
        b b.threads(4).max_num_batched_tokens(64),
        b b.prefix_cache(false),
        b b.prefix_cache_blocks(0),
        b b.prefix_cache_blocks(3),
        b b.prefix_cache_blocks(1).max_num_batched_tokens(7).block_size(3),
        b b.simd(SimdPath::Portable),
        b b.simd(SimdPath::Portable).threads(2).block_size(1),
        b b.simd(SimdPath::Avx2),
        b b.simd(SimdPath::Auto).threads(2).max_num_batched_tokens(3),
    ]
    .to_vec()
}

fn check_settings(model: &Model) {
    let requests = requests();
    let expected = model.alone(&requests);
    for (setting, adjust) in settings() {
        let engine = model.engine(adjust);
        assert_same(&format!("{setting}, cold"), &generate(&engine, &requests), &expected);
        assert_same(&format!("{setting}, warm"), &generate(&engine, &requests), &expected);
        check_scores(setting, &engine, &expected);
    }
}

/// The score of prompt and completion: the very logprobs of both.
fn check_scores(what: &str, engine: &Engine<Awake>, outputs: &[RequestOutput]) {
    for output in outputs {
        for completion in &output.completions {
            let whole = [output.prompt.as_slice(), &completion.tokens].concat();
            let scores = engine.score(&[whole]).expect("a valid sequence").remove(0);
            let (of_prompt, of_completion) = scores.split_at(output.prompt.len() - 1);
            assert_eq!(to_bits(of_completion), to_bits(&completion.logprobs), "{what}: score");
            if let Some(logprobs) = &output.prompt_logprobs {
                assert_eq!(to_bits(of_prompt), to_bits(logprobs), "{what}: score of the prompt");
            }
        }
    }
}

macro_rules! models {
    ($($test:ident: $model:expr),* $(,)?) => {$(
        #[test]
        fn $test() {
            check_settings(&$model);
        }
    )*};
}

models! {
    settings_of_f32: Model::tiny(false, DType::F32),
    settings_of_f16: Model::tiny(true, DType::F16),
    settings_of_bf16: Model::tiny(false, DType::Bf16),
    settings_of_llama2: Model::family("llama2"),
    settings_of_llama3: Model::family("llama3"),
    settings_of_llama_linear_sharded: Model::family("llama_linear_sharded"),
    settings_of_mistral: Model::family("mistral"),
    settings_of_qwen2: Model::family("qwen2"),
    settings_of_qwen2_yarn: Model::family("qwen2_yarn"),
    settings_of_qwen3: Model::family("qwen3"),
    settings_of_smollm2: Model::family("smollm2"),
}

/// Two requests of the set above in a crowd, in front, in the middle and at the end.
#[test]
fn batch_size() {
    for dtype in [DType::F32, DType::Bf16] {
        let model = Model::tiny(false, dtype);
        let observed: Vec<Request> = [1, 4].iter().map(|&i| requests().swap_remove(i)).collect();
        let expected = model.alone(&observed);
        let engine = model.engine(|builder| builder.max_num_batched_tokens(100));
        for others in [0, 1, 2, 3, 7, 8, 15, 31, 63] {
            let crowd: Vec<Request> = (0..others)
                .map(|i| Request::new(prompt(1 + i as usize % 9, 100 + i)).seed(i.into()).max_new_tokens(6))
                .collect();
            for place in [0, crowd.len() / 2, crowd.len()] {
                for (request, expected) in observed.iter().zip(&expected) {
                    let mut batch = crowd.clone();
                    batch.insert(place, request.clone());
                    let output = generate(&engine, &batch).remove(place);
                    assert_same(&format!("{place} of {others}"), &[output], std::slice::from_ref(expected));
                }
            }
        }
    }
}

/// B57: more than the pool holds; each is preempted and gives what it gives alone.
#[test]
fn b57_forced_preemption() {
    for model in [Model::tiny(false, DType::F32), Model::tiny(true, DType::Bf16), Model::family("mistral")] {
        let requests: Vec<Request> = (0..4)
            .map(|i| Request::new(prompt(8, i)).seed(i.into()).ignore_eos(true).max_new_tokens(64))
            .collect();
        let expected = model.alone(&requests);
        for blocks in [18, 27, 30] {
            for cache in [false, true] {
                let engine = model.engine(|b| b.kv_cache(KvCapacity::Blocks(blocks)).prefix_cache(cache));
                let outputs = generate(&engine, &requests);
                assert_same(&format!("{blocks} blocks, cache {cache}"), &outputs, &expected);
                assert!(outputs.iter().all(|output| output.completions[0].tokens.len() == 64));
                // 18 blocks hold one sequence at its full length of 72 tokens.
                assert!(engine.stats().preemptions > 0, "{blocks} blocks are too few for 4 sequences");
            }
        }
    }
}

/// The whole set of requests in a pool that preempts, with chunks and groups.
#[test]
fn preemption_of_everything() {
    for dtype in [DType::F32, DType::F16, DType::Bf16] {
        let model = Model::tiny(false, dtype);
        let requests = requests();
        let expected = model.alone(&requests);
        for (rows, cache) in [(1, true), (5, true), (40, true), (512, true), (512, false)] {
            let engine = model.engine(|b| {
                b.kv_cache(KvCapacity::Blocks(16)).max_num_batched_tokens(rows).prefix_cache(cache)
            });
            for round in 0..3 {
                let outputs = generate(&engine, &requests);
                assert_same(&format!("{rows} rows, cache {cache}, {round}"), &outputs, &expected);
            }
            // Few rows admit few sequences at a time, which fit together.
            assert!(rows < 40 || engine.stats().preemptions > 0, "{rows} rows: 16 blocks are too few");
        }
    }
}

/// B58: a sequence as long as the pool among a stream of short ones gets through, and is not thrown out
/// again and again.
#[test]
fn b58_a_long_request_makes_progress() {
    let model = Model::tiny(false, DType::F32);
    let long = Request::new(prompt(30, 1)).seed(1).ignore_eos(true).max_new_tokens(34);
    let expected = model.alone(std::slice::from_ref(&long));
    let engine = model.engine(|b| b.kv_cache(KvCapacity::Blocks(16)).max_num_batched_tokens(16));
    let short = |i: u32| Request::new(prompt(6, i)).seed(i.into()).ignore_eos(true).max_new_tokens(6);
    // Two that arrived earlier hold blocks that the long one waits for.
    engine.submit(short(90)).unwrap();
    engine.submit(short(91)).unwrap();
    engine.step().unwrap();
    let id = engine.submit(long).unwrap();
    let mut steps = 0;
    let output = loop {
        if steps % 2 == 0 {
            engine.submit(short(steps)).unwrap();
        }
        steps += 1;
        let step = engine.step().unwrap();
        if let Some(output) = step.outputs.into_iter().find(|output| output.request == id) {
            break output;
        }
        assert!(steps < 60, "the long request starves");
    };
    assert_same("long", &[output], &expected);
    let never = Request::new(prompt(30, 1)).max_new_tokens(35);
    assert_eq!(
        engine.submit(never).unwrap_err().to_string(),
        "30 prompt tokens and 35 new ones exceed max_model_len 64"
    );
}

/// B59: what samplers remember survives preemption, and chunks of one token don't advance it.
#[test]
fn b59_sampler_state_survives_preemption() {
    let model = Model::tiny(false, DType::F32);
    let requests: Vec<Request> = (0..6)
        .map(|i| {
            Request::new(prompt(9, i))
                .seed(i.into())
                .repetition_penalty(1.5)
                .presence_penalty(0.7)
                .frequency_penalty(0.4)
                .min_new_tokens(10)
                .stop_token_ids((1..20).collect::<Vec<_>>())
                .max_new_tokens(40)
        })
        .collect();
    let expected = model.alone(&requests);
    let stopped = expected
        .iter()
        .filter(|output| matches!(output.completions[0].finish_reason, FinishReason::Stop { .. }));
    assert!(stopped.count() > 0, "some must stop for the stop position to be compared");
    for rows in [1, 4, 512] {
        let engine =
            model.engine(|b| b.kv_cache(KvCapacity::Blocks(13)).block_size(4).max_num_batched_tokens(rows));
        assert_same(&format!("{rows} rows"), &generate(&engine, &requests), &expected);
        // A step of one row runs one sequence, which nobody can preempt.
        assert!(rows == 1 || engine.stats().preemptions > 0, "{rows} rows: 13 blocks are too few");
    }
}

/// B60: after any rounds of shortage and aborts an idle engine admits at once.
#[test]
fn b60_an_idle_engine_admits_at_once() {
    let model = Model::tiny(false, DType::F32);
    let engine = model.engine(|b| b.kv_cache(KvCapacity::Blocks(8)).max_num_seqs(3));
    let mut state = 1u32;
    let mut random = move |below: u32| {
        state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
        (state >> 16) % below
    };
    let (mut submitted, mut ended) = (0, 0);
    for round in 0..1000 {
        let len = 1 + random(20) as usize;
        let request = Request::new(prompt(len, round % 5)).max_new_tokens(1 + random(11) as usize);
        let id = engine.submit(request).unwrap();
        submitted += 1;
        if random(3) == 0 {
            ended += engine.abort(&[id]).outputs.len();
        }
        ended += engine.step().unwrap().outputs.len();
        if random(10) == 0 {
            ended += engine.abort_all().outputs.len();
        }
    }
    ended += engine.abort_all().outputs.len();
    assert_eq!(ended, submitted, "each ends once");
    let stats = engine.stats();
    assert_eq!((stats.blocks_owned, stats.live_requests, stats.running, stats.waiting), (0, 0, 0, 0));
    let normal = Request::new(prompt(20, 77)).seed(1).max_new_tokens(12);
    engine.submit(normal.clone()).unwrap();
    assert_eq!(engine.step().unwrap().sampled_tokens, 1, "admitted by the first step");
    assert_eq!(engine.abort_all().outputs[0].completions[0].tokens.len(), 1);
    assert_same("normal", &generate(&engine, std::slice::from_ref(&normal)), &model.alone(&[normal]));
}

/// B43: prompt logprobs whatever the cache holds, in every order.
#[test]
fn b43_prompt_logprobs_over_a_warm_cache() {
    let model = Model::tiny(false, DType::F32);
    let shared = prompt(18, 9);
    let scored: Vec<Request> = (0..3)
        .map(|i| Request::new([shared.clone(), prompt(5, i)].concat()).temperature(0.0).prompt_logprobs(true))
        .collect();
    let expected = model.alone(&scored);
    assert!(expected.iter().all(|output| output.prompt_logprobs.as_ref().is_some_and(|l| l.len() == 22)));
    for order in [[0, 1, 2], [2, 1, 0], [1, 2, 0]] {
        let engine = model.engine(|builder| builder);
        let filler = Request::new(shared.clone()).temperature(0.0);
        generate(&engine, &[filler]);
        for i in order {
            assert_same("in turn", &generate(&engine, &scored[i..=i]), std::slice::from_ref(&expected[i]));
        }
        let batch = order.map(|i| scored[i].clone());
        assert_same("together", &generate(&engine, &batch), &order.map(|i| expected[i].clone()));
    }
}

/// B44: cold, warm, in chunks, in batches: 200 prompts.
#[test]
fn b44_cold_warm_chunked_batched() {
    let model = Model::tiny(false, DType::F32);
    let requests: Vec<Request> = (0..crate::common::cases(200).max(20))
        .map(|i| {
            Request::new(prompt(3 + i as usize % 14, i)).temperature(0.0).ignore_eos(true).max_new_tokens(4)
        })
        .collect();
    let engine = model.engine(|b| b.prefix_cache(false));
    let one = |request: &Request| generate(&engine, std::slice::from_ref(request)).remove(0);
    let expected: Vec<RequestOutput> = requests.iter().map(one).collect();
    // An engine that has served gives what a new one gives.
    assert_same("used engine", &expected[..20], &model.alone(&requests[..20]));
    for rows in [1, 7, 4, 512] {
        let engine = model.engine(|b| b.max_num_batched_tokens(rows));
        for size in [1, 8] {
            for _ in 0..2 {
                let batches = requests.chunks(size).flat_map(|batch| generate(&engine, batch));
                assert_same(
                    &format!("{rows} rows, {size} at a time"),
                    &batches.collect::<Vec<_>>(),
                    &expected,
                );
            }
        }
        assert!(engine.stats().cached_tokens > 0, "the second pass hits the cache");
    }
}

/// B45: a seed counts whatever the neighbours have.
#[test]
fn b45_seeded_next_to_unseeded() {
    let model = Model::tiny(false, DType::F32);
    let seeded = Request::new(prompt(7, 1)).seed(42).max_new_tokens(20).ignore_eos(true);
    let expected = model.alone(std::slice::from_ref(&seeded));
    let engine = model.engine(|builder| builder);
    let unseeded = Request::new(prompt(7, 1)).max_new_tokens(20).ignore_eos(true);
    let batch = [unseeded.clone(), seeded.clone(), unseeded.clone(), unseeded, seeded];
    let outputs = generate(&engine, &batch);
    for place in [1, 4] {
        assert_same("seeded", &outputs[place..=place], &expected);
    }
    let tokens = |i: usize| &outputs[i].completions[0].tokens;
    assert!(tokens(0) != tokens(2) && tokens(2) != tokens(3), "without a seed each has its own");
    // The seed that the engine picked gives the same again.
    let again = Request::new(prompt(7, 1)).seed(outputs[2].completions[0].seed).max_new_tokens(20);
    assert_same("picked", &generate(&engine, &[again.ignore_eos(true)]), &outputs[2..=2]);
}

/// Requests without a seed: the same in each run, each its own, and on each of several engines its own, also if
/// the engines are seeded with their ranks.
#[test]
fn unseeded_requests_on_engines_of_several_seeds() {
    let model = Model::tiny(false, DType::F32);
    let batch = vec![Request::new(prompt(5, 1)).max_new_tokens(2); 12];
    let seeds = |seed: u64| {
        let engine = model.engine(|builder| builder.seed(seed));
        generate(&engine, &batch).iter().map(|output| output.completions[0].seed).collect::<Vec<_>>()
    };
    assert_eq!(seeds(3), seeds(3));
    let all: std::collections::HashSet<u64> = (0..4).flat_map(seeds).collect();
    assert_eq!(all.len(), 4 * batch.len(), "no two have one random stream");
}

/// B52: whole prompts in the cache: all full blocks but the one with the last token are hits.
#[test]
fn b52_whole_prompts_cached() {
    for block_size in [1, 2, 4, 5] {
        let model = Model::tiny(false, DType::F32);
        for len in [1, block_size, block_size + 1, 3 * block_size - 1, 3 * block_size, 3 * block_size + 1] {
            let request = Request::new(prompt(len, 3)).seed(2).max_new_tokens(3).ignore_eos(true);
            let expected = model.alone(std::slice::from_ref(&request));
            let engine = model.engine(|b| b.block_size(block_size));
            let run = |batch: usize| {
                let outputs = generate(&engine, &vec![request.clone(); batch]);
                let what = format!("{len} tokens, blocks of {block_size}");
                outputs.iter().for_each(|o| assert_same(&what, std::slice::from_ref(o), &expected));
                outputs.iter().map(|output| output.completions[0].cached_tokens).collect::<Vec<_>>()
            };
            let hit = (len - 1) / block_size * block_size;
            assert_eq!(run(1), [0], "{len} tokens, blocks of {block_size}: cold");
            assert_eq!(run(1), [hit], "{len} tokens, blocks of {block_size}: warm");
            assert_eq!(run(2), [hit, hit], "{len} tokens, blocks of {block_size}: warm, twice");
            engine.clear_prefix_cache();
            let twice = run(2);
            assert_eq!(twice[0], 0, "cleared");
            assert!(twice[1] <= hit, "{twice:?}");
        }
    }
}

/// Samples of a group are those of larger groups, of single requests, and of themselves before.
#[test]
fn groups() {
    let model = Model::tiny(false, DType::F32);
    let request = |n: usize| Request::new(prompt(10, 2)).samples(n).seed(3).max_new_tokens(12);
    let expected = model.alone(&[request(16)]).remove(0);
    assert_eq!(expected.completions.len(), 16);
    let distinct: std::collections::BTreeSet<_> = expected.completions.iter().map(|c| &c.tokens).collect();
    assert!(distinct.len() > 8, "samples have streams of their own");
    for blocks in [256, 8] {
        let engine = model.engine(|b| b.kv_cache(KvCapacity::Blocks(blocks)));
        for n in [1, 2, 5, 16] {
            let output = generate(&engine, &[request(n)]).remove(0);
            let expected =
                RequestOutput { completions: expected.completions[..n].to_vec(), ..expected.clone() };
            assert_same(&format!("{n} samples, {blocks} blocks"), &[output], &[expected]);
        }
    }
}

/// Sleep and wake in between, whatever became of the weights.
#[test]
fn sleep_and_wake() {
    for dtype in [DType::F32, DType::F16, DType::Bf16] {
        let model = Model::tiny(false, dtype);
        let Model::Tiny { weights, .. } = &model else { unreachable!("it is a tiny one") };
        let requests = requests();
        let expected = model.alone(&requests);
        let mut engine = model.engine(|builder| builder.threads(2));
        assert_same("before", &generate(&engine, &requests), &expected);
        for round in 0..3 {
            let options = SleepOptions::default();
            engine = match round {
                0 => engine.sleep(options.resident()).unwrap().restore_weights().unwrap(),
                1 => engine.sleep(options).unwrap().restore_weights().unwrap(),
                _ => engine.sleep_discarding(options).unwrap().load_weights(weights.source()).unwrap(),
            }
            .wake_up()
            .unwrap();
            let outputs = generate(&engine, &requests);
            assert_same("after", &outputs, &expected);
            let cached: Vec<usize> = outputs.iter().map(|o| o.completions[0].cached_tokens).collect();
            assert_eq!(cached[..3], [0, 0, 0], "nothing from before the sleep is found");
        }
    }
}

/// A completion cut anywhere and resumed is the completion.
#[test]
fn resume_at_every_token() {
    let model = Model::tiny(false, DType::F32);
    let request = requests().swap_remove(6);
    let expected = model.alone(std::slice::from_ref(&request)).remove(0);
    let engine = model.engine(|b| b.max_num_batched_tokens(5));
    let total = expected.completions[0].tokens.len();
    assert!(total > 2, "something to cut: {total}");
    for cut in 0..total {
        engine.submit(request.clone()).unwrap();
        let mut sampled = 0;
        while sampled < cut {
            let step = engine.step().unwrap();
            assert!(step.outputs.is_empty(), "cut before the end");
            sampled += step.sampled_tokens;
        }
        let partial = engine.abort_all().outputs.remove(0);
        assert_eq!(partial.completions[0].tokens, expected.completions[0].tokens[..cut]);
        let output = generate(&engine, &[request.resume(&partial).unwrap()]).remove(0);
        assert_same(&format!("cut at {cut}"), &[output], std::slice::from_ref(&expected));
    }
}

/// Outputs of which all, some or no samples had ended, resumed: the prompt's logprobs are computed again.
#[test]
fn resumed_prompt_logprobs() {
    let model = Model::tiny(false, DType::F32);
    let request = Request::new(prompt(11, 4))
        .samples(3)
        .seed(1)
        .prompt_logprobs(true)
        .stop_token_ids((1..25).collect::<Vec<_>>())
        .max_new_tokens(12);
    let expected = model.alone(std::slice::from_ref(&request));
    assert_eq!(expected[0].prompt_logprobs.as_ref().map(Vec::len), Some(10));
    let engine = model.engine(|b| b.max_num_batched_tokens(3));
    for steps in 0.. {
        engine.submit(request.clone()).unwrap();
        let mut outputs = Vec::new();
        (0..steps).for_each(|_| outputs.extend(engine.step().unwrap().outputs));
        let ended = !outputs.is_empty();
        outputs.extend(engine.abort_all().outputs);
        let resumed = request.resume(&outputs[0]).unwrap();
        let again = generate(&engine, &[resumed]);
        assert_same(&format!("after {steps} steps"), &again, &expected);
        assert_eq!(engine.stats().blocks_owned, 0);
        if ended {
            break;
        }
    }
}
