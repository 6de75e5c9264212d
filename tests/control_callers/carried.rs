//! Requests that bring what they had: partials, scores.

use dormouse::control::{Controller, Tags};
use dormouse::{InFlight, Request, SleepOptions};

use crate::common::awake;
use crate::support::{
    ask, bits, builder, done, eventually, long_builder, output, prompt, settled, sleep, spawn, wake, weights,
};

#[test]
fn c30_samples_that_a_partial_lacks_draw_from_the_groups_seed() {
    let w0 = weights(1);
    let asked = Request::new(prompt(21, 3)).max_new_tokens(9).ignore_eos(true).samples(2);
    let engine = awake(builder(), &w0);
    let mut partial = engine.generate(&[asked.clone().seed(77)]).unwrap().remove(0);
    let whole = bits(&partial);
    partial.completions.truncate(1);
    let resumed = asked.resume(&partial).unwrap();
    assert_eq!(
        bits(&engine.generate(std::slice::from_ref(&resumed)).unwrap().remove(0)),
        whole,
        "as the typed engine"
    );
    assert_eq!(bits(&ask(&spawn(&w0), &resumed)), whole);
}

#[test]
fn c04_a_retracted_scoring_is_completed() {
    let w0 = weights(1);
    // Many steps: it is met on the way.
    let build = || long_builder().max_num_batched_tokens(8);
    let asked = Request::new(prompt(2000, 3)).max_new_tokens(2).ignore_eos(true).seed(5);
    let partial = awake(long_builder(), &w0).generate(std::slice::from_ref(&asked)).unwrap().remove(0);
    let resumed = asked.prompt_logprobs(true).resume(&partial).unwrap();
    let engine = awake(build(), &w0);
    engine.submit(resumed.clone()).unwrap();
    engine.step().unwrap();
    let asleep = engine.sleep(SleepOptions::default().in_flight(InFlight::Retract)).unwrap();
    let engine = asleep.restore_weights().unwrap().wake_up().unwrap();
    let typed = loop {
        if let Some(output) = engine.step().unwrap().outputs.pop() {
            break output;
        }
    };
    let handle = Controller::spawn(awake(build(), &w0));
    let generation = handle.submit(resumed).unwrap();
    eventually(|| handle.metrics().engine.steps > 0);
    let slept = done(&handle, sleep(Tags::ALL, InFlight::Retract));
    assert_eq!(settled(&slept).retracted, [generation.id()]);
    done(&handle, wake(Tags::ALL));
    let output = output(generation);
    assert_eq!(bits(&output), bits(&typed));
    let scores = [output, typed].map(|output| output.prompt_logprobs.unwrap());
    assert_eq!(scores[0].len(), 1999);
    assert!(scores[0] == scores[1], "bit for bit");
}
