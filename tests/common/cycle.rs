//! Steps of the lifecycle that tests of it share.
#![allow(dead_code, unreachable_pub, reason = "each test binary uses a part")]

use dormouse::{
    Awake, DType, Discarded, Engine, Failed, Kept, LoadError, Request, Retention, Sleeping, WeightSource,
    WeightsLoaded,
};

use crate::common::{Weights, awake, bits, fresh, prompt, tiny_builder, tiny_weights};

pub fn weights(seed: u64) -> Weights {
    tiny_weights(false, DType::F32, seed)
}

pub fn engine(weights: &Weights) -> Engine<Awake> {
    awake(tiny_builder(false, DType::F32), weights)
}

/// Several blocks of prompt, some tokens, sampled.
pub fn request(seed: u32) -> Request {
    Request::new(prompt(21, seed)).max_new_tokens(9).ignore_eos(true).seed(u64::from(seed))
}

#[track_caller]
pub fn assert_like_fresh(engine: &Engine<Awake>, weights: &Weights, request: &Request) {
    let output = engine.generate(std::slice::from_ref(request)).expect("a valid request").remove(0);
    assert_eq!(bits(&output), bits(&fresh(weights, false, request)));
}

pub fn load<W>(asleep: Engine<Sleeping<W>>, weights: &Weights) -> Engine<WeightsLoaded>
where
    W: Retention,
    Engine<Sleeping<W>>: Load,
{
    asleep.load(weights.source().into_boxed()).expect("complete weights")
}

/// `load_weights` of both kinds of sleep.
pub trait Load: Sized {
    fn load(self, source: Box<dyn WeightSource + '_>) -> Result<Engine<WeightsLoaded>, (Self, LoadError)>;
}
impl Load for Engine<Sleeping<Discarded>> {
    fn load(self, source: Box<dyn WeightSource + '_>) -> Result<Engine<WeightsLoaded>, (Self, LoadError)> {
        self.load_weights(source).map_err(Failed::into_parts)
    }
}
impl Load for Engine<Sleeping<Kept>> {
    fn load(self, source: Box<dyn WeightSource + '_>) -> Result<Engine<WeightsLoaded>, (Self, LoadError)> {
        self.load_weights(source).map_err(Failed::into_parts)
    }
}

pub trait IntoBoxed<'a> {
    fn into_boxed(self) -> Box<dyn WeightSource + 'a>;
}
impl<'a, S: WeightSource + 'a> IntoBoxed<'a> for S {
    fn into_boxed(self) -> Box<dyn WeightSource + 'a> {
        Box::new(self)
    }
}
