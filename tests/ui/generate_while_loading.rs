//! A load holds its engine: it generates when it has been committed and has woken.
use dormouse::*;

fn rollout(load: Load<Discarded>) {
    let _ = load.generate(&[Request::new(vec![1])]);
}

fn main() {}
