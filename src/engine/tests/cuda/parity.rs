//! What the engine says on a GPU, beside what it says on the CPU.

use super::super::build_in_chunks;
use super::*;
use crate::completion::RequestOutput;

/// Logprobs differ by at most this: a few roundings of f32, over two layers.
const TOLERANCE: f32 = 2e-5;

/// Tokens are equal until the two best candidates are nearer than the tolerance.
fn assert_near(what: &str, on_gpu: &[RequestOutput], on_cpu: &[RequestOutput]) -> (f32, usize) {
    let (mut worst, mut compared) = (0.0_f32, 0);
    for (on_gpu, on_cpu) in on_gpu.iter().zip(on_cpu) {
        for (on_gpu, on_cpu) in on_gpu.completions.iter().zip(&on_cpu.completions) {
            let tops = on_cpu.top_logprobs.as_ref().expect("asked for");
            for (i, (a, b)) in on_gpu.tokens.iter().zip(&on_cpu.tokens).enumerate() {
                if a != b {
                    let margin = tops[i][0].logprob - tops[i][1].logprob;
                    assert!(margin < 2.0 * TOLERANCE, "{what}: token {i} is {a} for {b}, margin {margin}");
                    break;
                }
                worst = worst.max((on_gpu.logprobs[i] - on_cpu.logprobs[i]).abs());
                compared += 1;
            }
        }
    }
    assert!(worst <= TOLERANCE, "{what}: logprobs are off by {worst}");
    (worst, compared)
}

#[test]
fn b44_greedy_output_is_the_cpus_and_logprobs_are_near() {
    let gpu = Gpu::new();
    let on_gpu = awake_on(gpu.device(), 1);
    let on_cpu = awake_on(Arc::new(cpu()), 1);
    let prompt =
        |i: u32| (0..1 + i * 5 % 70).map(|j| 1 + (i * 31 + j * 7 + j * j * i) % 63).collect::<Vec<_>>();
    let requests: Vec<Request> = (0..40)
        .map(|i| Request::new(prompt(i)).temperature(0.0).max_new_tokens(8).ignore_eos(true).top_logprobs(2))
        .collect();
    let (worst, compared) =
        assert_near("greedy", &on_gpu.generate(&requests).unwrap(), &on_cpu.generate(&requests).unwrap());
    assert!(compared > 300, "{compared} tokens compared, off by {worst}");
    // Scores are the same bits as what was sampled, on either.
    let output = on_gpu.generate(&requests[7..8]).unwrap().remove(0);
    let whole = [output.prompt.clone(), output.completions[0].tokens.clone()].concat();
    let scores = on_gpu.score(&[&whole]).unwrap().remove(0);
    let on_cpu = on_cpu.score(&[&whole]).unwrap().remove(0);
    let tail = &scores[scores.len() - 8..];
    let to_bits = |x: &[f32]| x.iter().map(|x| x.to_bits()).collect::<Vec<_>>();
    assert_eq!(to_bits(tail), to_bits(&output.completions[0].logprobs));
    for (a, b) in scores.iter().zip(&on_cpu) {
        assert!((a - b).abs() <= TOLERANCE, "{a} for {b}");
    }
    drop(on_gpu);
    gpu.assert_clean();
}

fn awake_in_chunks(device: Arc<CudaDevice>, tokens: usize) -> Engine<Awake> {
    let asleep = build_in_chunks(device, tokens).unwrap();
    asleep.load_weights(Seeded::new(1)).unwrap().wake_up().unwrap()
}

/// Two hundred prompts: cold, warm, in chunks of any size, alone and eight at a time: the same bits.
#[test]
fn b44_200_prompts_are_the_same_bits_cold_warm_chunked_and_batched() {
    let gpu = Gpu::new();
    let prompts: Vec<Request> = (0..200_u32)
        .map(|i| {
            let prompt =
                (0..3 + i * 11 % 30).map(|j| 1 + (i * 17 + j * 5 + j * j * (i % 7)) % 63).collect::<Vec<_>>();
            Request::new(prompt).max_new_tokens(2).ignore_eos(true).seed(u64::from(i))
        })
        .collect();
    let engine = awake_on(gpu.device(), 1);
    let say = |request: &Request| bits(&engine.generate(std::slice::from_ref(request)).unwrap()).remove(0);
    let mut cold = Bits::new();
    for (i, request) in prompts.iter().enumerate() {
        engine.clear_prefix_cache();
        cold.push(say(request));
        assert!(say(request) == cold[i], "prompt {i}, warm");
    }
    assert!(engine.stats().cached_tokens > 1000, "{:?}", engine.stats());
    for together in [true, false] {
        let batched: Bits =
            prompts.chunks(8).flat_map(|some| bits(&engine.generate(some).unwrap())).collect();
        assert!(batched == cold, "eight at a time, warm: {together}");
        engine.clear_prefix_cache();
    }
    drop(engine);
    // Each prompt in one of the sizes, and a few one token at a time.
    for (first, step, chunk) in [(0, 16, 1), (0, 3, 4), (1, 3, 7), (2, 3, 40)] {
        let engine = awake_in_chunks(gpu.device(), chunk);
        for (i, request) in prompts.iter().enumerate().skip(first).step_by(step) {
            let said = bits(&engine.generate(std::slice::from_ref(request)).unwrap()).remove(0);
            assert!(said == cold[i], "prompt {i} in chunks of {chunk}");
        }
    }
    gpu.assert_clean();
}
