//! One tiny checkpoint of each model family against references that transformers computed in float64
//! (`tests/families/make_families.py`).

mod common;
#[path = "common/reference.rs"]
mod reference;

use std::path::PathBuf;

use crate::common::on_device;
use dormouse::{Engine, KvCapacity};

fn check(family: &str) {
    let directory = PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("tests/families").join(family);
    let engine = on_device(Engine::builder(&directory))
        .kv_cache(KvCapacity::Blocks(64))
        .block_size(4)
        .threads(2)
        .build()
        .expect("the checkpoint is valid");
    let worst = reference::check(&engine, &directory.join("reference.json"), 1e-3);
    eprintln!("{family}: {worst:?}");
    assert!(worst.cases > 0 && worst.greedy_tokens > 20, "the reference compares something: {worst:?}");
}

macro_rules! families {
    ($($family:ident)*) => {$(
        #[test]
        fn $family() {
            check(stringify!($family));
        }
    )*};
}

families! { llama2 llama3 smollm2 mistral qwen2 qwen2_yarn qwen3 llama_linear_sharded }
