//! Sets of weights that are known by digest, and what a fresh engine with each of them says.
#![allow(dead_code, unreachable_pub, reason = "each test binary uses a part")]

use std::collections::HashMap;
use std::ops::Range;
use std::sync::{Arc, Mutex};

use dormouse::{
    Awake, BucketWriter, Completion, DType, Engine, FinishReason, Request, RequestOutput, SourceError,
    TensorSpec, WeightSource, WeightsDigest,
};

use crate::common::{Weights, awake, prompt, tiny_builder, tiny_weights};
use crate::exact;

pub const SETS: usize = 4;
/// Requests that [`request`] makes.
pub const REQUESTS: usize = 48;
/// The tensor that a partial update brings.
pub const ONE: usize = 1;

/// Complete weights: a set, with one tensor that may be another's.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Mix {
    pub base: usize,
    pub one: usize,
}

impl Mix {
    pub fn of(set: usize) -> Self {
        Self { base: set, one: set }
    }
}

/// Some tensors of a set.
#[derive(Clone)]
pub struct Part {
    weights: Arc<Weights>,
    tensors: Range<usize>,
}

impl WeightSource for Part {
    fn index(&mut self) -> Result<Vec<TensorSpec>, SourceError> {
        let tensors = self.weights.0[self.tensors.clone()].iter();
        let spec = |(name, tensor): &(String, crate::common::Tensor)| TensorSpec {
            name: name.clone(),
            dtype: DType::F32,
            shape: tensor.shape.clone(),
        };
        Ok(tensors.map(spec).collect())
    }

    fn read(&mut self, tensor: usize, sink: &mut dyn FnMut(&[u8])) -> Result<(), SourceError> {
        sink(&self.weights.0[self.tensors.start + tensor].1.data);
        Ok(())
    }
}

impl Part {
    /// The same in one encoded bucket.
    pub fn bucket(mut self) -> Vec<u8> {
        let mut buckets = Vec::new();
        let keep = &mut |bucket| {
            buckets.push(bucket);
            Ok(())
        };
        BucketWriter::new(1 << 20).write(&mut self, keep).expect("tensors that fit");
        buckets.remove(0)
    }
}

/// One engine for each set that was asked about: no prefix cache, one request at a time.
pub struct Oracle {
    sets: Vec<Arc<Weights>>,
    digests: HashMap<WeightsDigest, Mix>,
    engines: Mutex<HashMap<Mix, Arc<Engine<Awake>>>>,
    known: Mutex<HashMap<(Mix, String), Arc<RequestOutput>>>,
}

impl Oracle {
    pub fn new() -> Self {
        let sets: Vec<_> =
            (1..=SETS as u64).map(|seed| Arc::new(tiny_weights(false, DType::F32, seed))).collect();
        let (engines, known) = (Mutex::default(), Mutex::default());
        let mut oracle = Self { sets, digests: HashMap::new(), engines, known };
        for base in 0..SETS {
            for one in 0..SETS {
                let mix = Mix { base, one };
                let digest = WeightsDigest::of(&mut oracle.weights(mix).source()).expect("a set in memory");
                oracle.digests.insert(digest, mix);
            }
        }
        assert_eq!(oracle.digests.len(), SETS * SETS, "sets can be told apart");
        oracle
    }

    pub fn weights(&self, mix: Mix) -> Weights {
        let mut weights = (*self.sets[mix.base]).clone();
        weights.0[ONE] = self.sets[mix.one].0[ONE].clone();
        weights
    }

    /// The tensors in this range.
    pub fn part(&self, set: usize, tensors: Range<usize>) -> Part {
        Part { weights: Arc::clone(&self.sets[set]), tensors }
    }

    pub fn whole(&self, set: usize) -> Part {
        self.part(set, 0..self.tensors())
    }

    pub fn one(&self, set: usize) -> Part {
        self.part(set, ONE..ONE + 1)
    }

    pub fn tensors(&self) -> usize {
        self.sets[0].0.len()
    }

    pub fn name_of_one(&self) -> &str {
        &self.sets[0].0[ONE].0
    }

    /// Which weights these are.
    pub fn mix(&self, digest: &WeightsDigest) -> Option<Mix> {
        self.digests.get(digest).copied()
    }

    fn engine(&self, mix: Mix) -> Arc<Engine<Awake>> {
        let mut engines = self.engines.lock().expect("no panic");
        let new = || Arc::new(awake(tiny_builder(false, DType::F32).prefix_cache(false), &self.weights(mix)));
        Arc::clone(engines.entry(mix).or_insert_with(new))
    }

    /// What an engine with these weights says to this request.
    fn say(&self, mix: Mix, request: &Request) -> RequestOutput {
        let output = self.engine(mix).generate(std::slice::from_ref(request));
        output.expect("the other engine took it").remove(0)
    }

    /// The same, known if it was asked before.
    pub fn answer(&self, mix: Mix, request: &Request) -> Arc<RequestOutput> {
        let key = (mix, format!("{request:?}"));
        if let Some(known) = self.known.lock().expect("no panic").get(&key) {
            return Arc::clone(known);
        }
        let output = Arc::new(self.say(mix, request));
        self.known.lock().expect("no panic").insert(key, Arc::clone(&output));
        output
    }

    /// Checks that each span of tokens is what its weights say. `request` carries nothing.
    pub fn check(&self, request: &Request, output: &RequestOutput) {
        assert_eq!(output.prompt, request.prompt);
        assert_eq!(output.completions.len(), request.params.samples, "all samples");
        // Neither its name nor how it is delivered changes what it says.
        let mut request = request.clone().stream(false);
        request.id = None;
        for completion in &output.completions {
            let mut covered = 0;
            for span in &completion.versions {
                assert_eq!(span.tokens.start, covered, "no gaps");
                covered = span.tokens.end;
                let mix = self.mix(&span.version.digest);
                let mix = mix.unwrap_or_else(|| panic!("{} is of no set", span.version));
                self.check_span(&request, completion, span.tokens.clone(), mix);
            }
            assert_eq!(covered, completion.tokens.len(), "all tokens");
            if let FinishReason::Error(error) = &completion.finish_reason {
                panic!("nothing is wrong with the request: {error}");
            }
        }
    }

    fn check_span(&self, request: &Request, completion: &Completion, tokens: Range<usize>, mix: Mix) {
        let continued = if tokens.start == 0 {
            self.answer(mix, request)
        } else {
            // The others of its group start anew: they don't matter.
            let before = RequestOutput {
                prompt: request.prompt.clone(),
                completions: vec![cut(completion, tokens.start)],
                ..(*self.answer(mix, request)).clone()
            };
            Arc::new(self.say(mix, &request.resume(&before).expect("the same prompt")))
        };
        let expected = &continued.completions[completion.index];
        assert!(expected.tokens.len() >= tokens.end, "{completion:?} is longer than {expected:?}");
        let ended = matches!(completion.finish_reason, FinishReason::Stop { .. } | FinishReason::Length);
        let (got, expected) = if ended && tokens.end == completion.tokens.len() {
            (exact::completion(completion), exact::completion(expected))
        } else {
            let to_here = |completion| exact::completion(&cut(completion, tokens.end));
            (to_here(completion), to_here(expected))
        };
        assert_eq!(got, expected, "tokens {tokens:?} of {completion:?}, weights {mix:?}, {request:?}");
    }
}

/// What the cache did is no part of what the weights say.
fn cut(completion: &Completion, len: usize) -> Completion {
    Completion { cached_tokens: 0, ..crate::common::cut(completion, len) }
}

/// One of a few requests of every kind, by number; some share their prefix.
pub fn request(number: usize) -> Request {
    let number = number % REQUESTS;
    let prompt = prompt(1 + number * 5 % 23, 1 + number as u32 % 3);
    let request = Request::new(prompt).samples(1 + number % 7 / 3).max_new_tokens(1 + number * 7 % 16);
    let request = request.seed(number as u64);
    match number % 8 {
        0 => request,
        1 => request.temperature(0.0).ignore_eos(true),
        2 => request.top_k(3).top_p(0.9).processed_logprobs(true).return_kept_set(true),
        3 => request.top_logprobs(2).ignore_eos(true),
        4 => request.repetition_penalty(1.4).frequency_penalty(0.3).ignore_eos(true),
        5 => request.stop_token_ids((1..12).collect::<Vec<_>>()),
        6 => request.cache_salt("tenant").ignore_eos(true),
        _ => request.ignore_eos(true).max_new_tokens(16),
    }
}

/// Whether any sample was cut off.
pub fn was_aborted(output: &RequestOutput) -> bool {
    output.completions.iter().any(|completion| completion.finish_reason == FinishReason::Abort)
}
