//! The passing twin of `generate_while_loading.rs`.
use dormouse::*;

fn rollout(load: Load<Discarded>) {
    let engine = load.commit().unwrap().wake_up().unwrap();
    let _ = engine.generate(&[Request::new(vec![1])]);
}

fn main() {}
