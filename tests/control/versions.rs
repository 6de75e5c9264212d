//! Which weights made what: the version of each token is that of the weights that were there, and no failed update
//! has one.

use dormouse::control::{AbortTarget, Controller, ErrorKind, Operation, PauseMode, Payload, Report, Tags};
use dormouse::{
    InFlight, LoadOptions, LoraAdapter, NameMap, RequestOutput, SafetensorsBytes, UpdateOptions,
    WeightVersion,
};

use crate::common::{awake, encode, fresh};
use crate::support::{
    Q, all_of, ask, bits, block_on, buffered, builder, digest, discard, done, endless, eventually, expected,
    lacking, load, long_builder, output, refused, request, rest, sleep, some_of, spawn, spawn_with, tokens,
    update, wake, weights, what_is_there,
};

fn labelled(weights: Payload, label: &str) -> Operation {
    let options = UpdateOptions::from(LoadOptions::default().label(label));
    Operation::UpdateWeights { weights, options }
}

#[test]
fn c22_b46_b48_the_version_of_a_completion_is_the_one_that_the_update_returned() {
    let sets = [weights(1), weights(2)];
    let handle = spawn(&sets[0]);
    let first = handle.state().version.unwrap();
    let mut last = first.clone();
    for round in 1..=4 {
        let set = &sets[round % 2];
        done(&handle, sleep(Tags::KV_CACHE, InFlight::Refuse));
        // Neither a version nor a label comes of one that fails.
        let failed = refused(&handle, labelled(lacking(set), "never"));
        assert_eq!(failed.kind(), ErrorKind::InvalidWeights);
        assert_eq!(handle.state().version.as_ref(), Some(&last));
        let label = format!("step {round}");
        let updated = done(&handle, labelled(all_of(set), &label));
        let [Report::Update(report)] = &updated.report[..] else { panic!("{updated:?}") };
        assert_eq!((&report.previous, Some(&report.version)), (&last, updated.state_after.version.as_ref()));
        assert_eq!(report.version.label.as_deref(), Some(label.as_str()));
        assert_eq!((report.version.counter, report.version.digest), (round as u64 + 1, digest(set)));
        last = report.version.clone();
        // A sleep changes no version.
        done(&handle, sleep(Tags::WEIGHTS, InFlight::Refuse));
        done(&handle, wake(Tags::ALL));
        let output = ask(&handle, &request(1));
        let spans = &output.completions[0].versions;
        assert_eq!((spans.len(), &spans[0].version, spans[0].tokens.clone()), (1, &last, 0..9));
        assert_eq!(bits(&output), expected(set, &request(1)));
        let text = handle.metrics().render_prometheus();
        let line = format!("digest=\"{}\",label=\"{label}\"}} {}", last.digest, last.counter);
        assert!(text.contains(&line), "{text}");
    }
    assert!(last.digest == first.digest && last.counter == 5, "there and back");
    done(&handle, Operation::Verify);
}

#[test]
fn b47_requests_in_flight_over_an_update_say_which_weights_made_which_tokens() {
    let (w0, w1) = (weights(1), weights(2));
    let handle = spawn_with(buffered(40), &w0);
    let v0 = handle.state().version.unwrap();
    let short = |seed| request(seed).max_new_tokens(4);
    let long = |seed| request(seed).max_new_tokens(70).stream(true);
    let before: Vec<_> = (0..10).map(|seed| handle.submit(short(seed)).unwrap()).collect();
    eventually(|| handle.metrics().live_requests == 0);
    let mut over: Vec<_> = (10..30).map(|seed| handle.submit(long(seed)).unwrap()).collect();
    let begun: Vec<_> = over.iter_mut().map(|generation| tokens(generation, 2)).collect();
    done(&handle, sleep(Tags::KV_CACHE, InFlight::Retract));
    done(&handle, update(all_of(&w1)));
    done(&handle, wake(Tags::KV_CACHE));
    let v1 = handle.state().version.unwrap();
    for (seed, generation) in (0..).zip(before) {
        let output = output(generation);
        assert!(output.completions[0].versions.iter().all(|span| span.version == v0));
        assert_eq!(bits(&output), expected(&w0, &short(seed)));
    }
    for (seed, (begun, generation)) in (10..).zip(begun.into_iter().zip(over)) {
        let output = rest(begun, generation);
        let completion = &output.completions[0];
        let spans: Vec<_> = completion.versions.iter().map(|span| &span.version).collect();
        assert_eq!(spans, [&v0, &v1]);
        let middle = completion.versions[0].tokens.end;
        assert_eq!(completion.versions[1].tokens, middle..70);
        let whole = expected(&w0, &long(seed));
        assert_eq!(completion.tokens[..middle], whole[0].0[..middle], "the old weights made these");
    }
}

#[test]
fn b49_one_that_ran_has_both_versions_in_order_and_one_that_waited_the_new_one_only() {
    let (w0, w1) = (weights(1), weights(2));
    for policy in [InFlight::Abort, InFlight::Retract] {
        let engine = awake(long_builder().max_num_seqs(1), &w0);
        // Nobody is set aside: the first runs, the second waits for it.
        let handle = Controller::with(buffered(100_000)).drive(engine);
        let v0 = handle.state().version.unwrap();
        let mut running = handle.submit(endless(1)).unwrap();
        let mut begun = tokens(&mut running, 10);
        let waiting = handle.submit(request(2)).unwrap();
        done(&handle, Operation::Pause(PauseMode::Keep));
        done(&handle, sleep(Tags::KV_CACHE, policy));
        done(&handle, update(all_of(&w1)));
        done(&handle, wake(Tags::KV_CACHE));
        let v1 = handle.state().version.unwrap();
        if policy == InFlight::Abort {
            assert_eq!(versions(&rest(begun, running)), [v0]);
            assert!(versions(&output(waiting)).is_empty());
            continue;
        }
        begun.extend(what_is_there(&mut running));
        let old = begun.len();
        done(&handle, Operation::Resume);
        begun.extend(tokens(&mut running, 5));
        let target = AbortTarget::These { requests: vec![running.id()], names: vec![] };
        assert_eq!(handle.abort(target), [running.id()]);
        let first = rest(begun, running);
        assert_eq!(versions(&first), [v0, v1.clone()]);
        assert_eq!(first.completions[0].versions[0].tokens, 0..old);
        let second = output(waiting);
        assert_eq!(versions(&second), [v1]);
        assert_eq!(bits(&second), expected(&w1, &request(2)));
    }
}

fn versions(output: &RequestOutput) -> Vec<WeightVersion> {
    output.completions[0].versions.iter().map(|span| span.version.clone()).collect()
}

#[test]
fn b47_what_is_queued_while_nothing_serves_is_made_by_the_weights_of_the_wake() {
    let (w0, w1) = (weights(1), weights(2));
    let handle = spawn_with(crate::support::queueing(), &w0);
    done(&handle, discard(InFlight::Refuse));
    let queued = handle.submit(request(1)).unwrap();
    done(&handle, load(all_of(&w1)));
    done(&handle, wake(Tags::KV_CACHE));
    let output = output(queued);
    assert_eq!(output.completions[0].versions[0].version, handle.state().version.unwrap());
    assert_eq!(bits(&output), expected(&w1, &request(1)));
}

#[test]
fn parts_and_adapters_change_what_they_name_and_the_digest_says_so() {
    let (w0, w1) = (weights(1), weights(2));
    let handle = spawn(&w0);
    done(&handle, sleep(Tags::KV_CACHE, InFlight::Refuse));
    let options = UpdateOptions::default().partial([Q]);
    done(&handle, Operation::UpdateWeights { weights: some_of(&w1, &[Q]), options });
    let mut mixed = w0.clone();
    let q = w1.0.iter().find(|(name, _)| name == Q).unwrap().1.clone();
    mixed.0.iter_mut().find(|(name, _)| name == Q).unwrap().1 = q;
    assert_eq!(handle.state().version.unwrap().digest, digest(&mixed));
    done(&handle, wake(Tags::KV_CACHE));
    assert_eq!(bits(&ask(&handle, &request(1))), bits(&fresh(&mixed, false, &request(1))));
    // An adapter, as the engine merges it.
    let adapter = || {
        let factor = |rows, columns| {
            let values = (0..rows * columns).map(|i| (i % 7) as f32 * 0.01).collect();
            encode(dormouse::DType::F32, vec![rows, columns], values)
        };
        let module = "model.layers.0.self_attn.q_proj";
        let tensors = [("lora_A", factor(4, 32)), ("lora_B", factor(32, 4))]
            .map(|(name, tensor)| (format!("{module}.{name}.weight"), tensor));
        let bytes = safetensors::serialize(tensors.iter().map(|(name, t)| (name.clone(), t)), None).unwrap();
        LoraAdapter::read(SafetensorsBytes::new(&bytes), &NameMap::default(), 2.0).unwrap()
    };
    let mut engine = builder().build_asleep().unwrap().load_weights(mixed.source()).unwrap();
    let mut merging = engine.begin_update(UpdateOptions::default().partial([Q])).unwrap();
    merging.push_adapter(&adapter()).unwrap();
    let merged = merging.commit().unwrap().version.digest;
    let payload = || Payload::Adapter(Box::new(adapter()));
    done(&handle, sleep(Tags::KV_CACHE, InFlight::Refuse));
    done(&handle, update(payload()));
    assert_eq!(handle.state().version.unwrap().digest, merged);
    // It changes weights, and needs some.
    done(&handle, discard(InFlight::Refuse));
    assert_eq!(refused(&handle, load(payload())).kind(), ErrorKind::InvalidArgument);
    done(&handle, wake(Tags::WEIGHTS));
    assert_eq!(refused(&handle, update(payload())).kind(), ErrorKind::Conflict);
    assert!(block_on(handle.control(load(all_of(&w0)))).is_ok());
}
