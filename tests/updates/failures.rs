//! Whatever goes wrong at whatever point of an update: a staged one leaves all as it was, one in place is
//! known to have torn the weights, or has not touched them. Then a good one works.

use std::panic::{AssertUnwindSafe, catch_unwind};

use dormouse::{
    Bucket, BucketEntry, CommitError, DType, Delta, Engine, LoadOptions, PieceError, PushError, SourceError,
    SparseOp, TensorSpec, TransferError, Update, UpdateError, UpdateMode, UpdateOptions, WeightSource,
    WeightsDigest, WeightsLoaded,
};

use crate::common::{Tensor, Weights, encode};
use crate::cycle::weights;
use crate::faulty::{Fault, Faulty};
use crate::support::{
    EMBEDDING, Feed, Q, assert_holds, assert_wakes_like_fresh, get, get_mut, known, loaded, spec,
    wakes_like_fresh,
};

/// What goes wrong after some tensors have arrived.
#[derive(Debug, Clone, Copy, PartialEq)]
enum Wrong {
    Dropped,
    Forgotten,
    Panics,
    Missing,
    HalfFilled,
    BackOnly,
    Unknown,
    Shape,
    DType,
    Twice,
    Overlap,
    OutOfRange,
    NotFinite,
    Digest,
    BadBucket,
    BadDelta,
    Source(Fault),
}

const ALL: [Wrong; 24] = [
    Wrong::Dropped,
    Wrong::Forgotten,
    Wrong::Panics,
    Wrong::Missing,
    Wrong::HalfFilled,
    Wrong::BackOnly,
    Wrong::Unknown,
    Wrong::Shape,
    Wrong::DType,
    Wrong::Twice,
    Wrong::Overlap,
    Wrong::OutOfRange,
    Wrong::NotFinite,
    Wrong::Digest,
    Wrong::BadBucket,
    Wrong::BadDelta,
    Wrong::Source(Fault::Error),
    Wrong::Source(Fault::HalfThenError),
    Wrong::Source(Fault::Panic),
    Wrong::Source(Fault::HalfThenPanic),
    Wrong::Source(Fault::Short),
    Wrong::Source(Fault::Nothing),
    Wrong::Source(Fault::Long),
    Wrong::Source(Fault::Finish),
];

/// The push must fail, be followed by refusals only, and the commit must say so.
fn refused(mut update: Update<'_>, pushed: Result<(), PushError>, w1: &Weights) -> PushError {
    let error = pushed.unwrap_err();
    let again = update.all(&mut w1.source());
    assert!(matches!(again, Err(PushError::Failed)), "{again:?}");
    let delta = Delta::Sparse { indices: &[], values: &[], dtype: DType::F32, op: SparseOp::Add };
    let again = update.push_delta(Q, &delta);
    assert!(matches!(again, Err(PushError::Failed)), "{again:?}");
    assert!(matches!(update.commit(), Err(CommitError::PushFailed)));
    error
}

/// Runs an update that goes wrong when `at` tensors have arrived; tells whether anything can have been written.
fn go_wrong(
    loaded: &mut Engine<WeightsLoaded>,
    mut options: UpdateOptions,
    (wrong, at): (Wrong, usize),
    w1: &Weights,
) -> bool {
    options.load = LoadOptions::default().require_finite().label("never");
    if wrong == Wrong::Digest {
        options.load = options.load.expect_digest(WeightsDigest::from_bytes([1; 32]));
    }
    let mut update = loaded.begin_update(options).unwrap();
    for (name, tensor) in &w1.0[..at] {
        update.push(name, &tensor).unwrap();
    }
    let written = at > 0;
    match wrong {
        Wrong::Dropped => drop(update),
        Wrong::Forgotten => {
            crate::common::leaks_on_purpose();
            std::mem::forget(update);
        }
        Wrong::Panics => {
            let feeding = AssertUnwindSafe(move || {
                let _update = update;
                panic!("the feeding code panics");
            });
            catch_unwind(feeding).unwrap_err();
        }
        Wrong::Missing | Wrong::HalfFilled | Wrong::BackOnly | Wrong::Digest => {
            return not_committed(update, (wrong, at), w1) || written;
        }
        Wrong::Unknown | Wrong::Twice | Wrong::BadBucket | Wrong::BadDelta => {
            push_wrong(update, (wrong, at), w1)
        }
        // What is left to send goes wrong: nothing is.
        _ if at == w1.0.len() => drop(update),
        Wrong::Source(fault) => return read_wrong(update, (fault, at), w1) || written,
        _ => push_wrong_tensor(update, wrong, &w1.0[at], w1),
    }
    written
}

/// All that was pushed is right, and not what is wanted; tells whether it wrote more.
fn not_committed(mut update: Update<'_>, (wrong, at): (Wrong, usize), w1: &Weights) -> bool {
    let tensors = w1.0.len();
    if wrong == Wrong::Digest {
        for (name, tensor) in &w1.0[at..] {
            update.push(name, &tensor).unwrap();
        }
        let error = update.commit().unwrap_err();
        assert!(matches!(error, CommitError::Transfer(TransferError::WrongDigest { .. })), "{error}");
        return true;
    }
    if at == tensors {
        return false;
    }
    if wrong == Wrong::Missing {
        let CommitError::Mismatch(faults) = update.commit().unwrap_err() else { panic!("not complete") };
        assert_eq!((faults.missing.len(), faults.num_faults()), (tensors - at, tensors - at));
        return false;
    }
    let (name, tensor) = &w1.0[at];
    let half = tensor.data.len() / 2;
    let range = if wrong == Wrong::HalfFilled { 0..half } else { half..tensor.data.len() };
    update.push_piece(&spec(name, tensor), range.start, &tensor.data[range.clone()]).unwrap();
    for (name, tensor) in &w1.0[at + 1..] {
        update.push(name, &tensor).unwrap();
    }
    let CommitError::Mismatch(faults) = update.commit().unwrap_err() else { panic!("not complete") };
    assert_eq!((faults.incomplete[0].name.as_str(), faults.num_faults()), (name.as_str(), 1));
    assert_eq!(faults.incomplete[0].received_bytes, range.len() as u64);
    true
}

/// A push that can go wrong at any point.
fn push_wrong(mut update: Update<'_>, (wrong, at): (Wrong, usize), w1: &Weights) {
    let (name, tensor) = &w1.0[at.min(w1.0.len() - 1)];
    match wrong {
        Wrong::Unknown => {
            let pushed = update.push("model.layers.2.mlp.up_proj.weight", &tensor);
            let PushError::Mismatch(faults) = refused(update, pushed, w1) else { panic!() };
            assert_eq!((faults.unknown.len(), faults.num_faults()), (1, 1));
        }
        Wrong::Twice if at == 0 => drop(update),
        Wrong::Twice => {
            let (name, tensor) = &w1.0[at - 1];
            let pushed = update.push(name, &tensor);
            let PushError::Mismatch(faults) = refused(update, pushed, w1) else { panic!() };
            assert_eq!(faults.duplicate, std::slice::from_ref(name));
        }
        Wrong::BadBucket => {
            let mut unknown = spec(name, tensor);
            unknown.name.push('x');
            let (data, bytes) = (tensor.data.repeat(2), tensor.data.len());
            let entries = vec![
                BucketEntry { tensor: spec(name, tensor), offset: 0, range: 0..bytes },
                BucketEntry { tensor: unknown, offset: 0, range: bytes..2 * bytes },
            ];
            let pushed = update.push_bucket(&Bucket::new(entries, &data).unwrap());
            assert!(matches!(refused(update, pushed, w1), PushError::Mismatch(_)));
        }
        _ => {
            let delta =
                Delta::Sparse { indices: &[3, 2], values: &[0; 8], dtype: DType::F32, op: SparseOp::Set };
            let pushed = update.push_delta(name, &delta);
            let error = refused(update, pushed, w1);
            // The last tensor is there already when all are.
            match at == w1.0.len() {
                true => assert!(matches!(error, PushError::Mismatch(_)), "{error}"),
                false => assert!(matches!(error, PushError::Delta { .. }), "{error}"),
            }
        }
    }
}

/// The next tensor is no good.
fn push_wrong_tensor(mut update: Update<'_>, wrong: Wrong, (name, tensor): &(String, Tensor), w1: &Weights) {
    let (spec, mut bad) = (spec(name, tensor), tensor.clone());
    match wrong {
        Wrong::Shape => {
            bad.shape.push(1);
            let pushed = update.push(name, &&bad);
            let PushError::Mismatch(faults) = refused(update, pushed, w1) else { panic!() };
            assert_eq!((&faults.wrong_shape[0].received, faults.num_faults()), (&bad.shape, 1));
        }
        Wrong::DType => {
            let elements = tensor.shape.iter().product();
            let bad = encode(DType::Bf16, tensor.shape.clone(), vec![0.5; elements]);
            let pushed = update.push(name, &&bad);
            let PushError::Mismatch(faults) = refused(update, pushed, w1) else { panic!() };
            assert_eq!((faults.wrong_dtype[0].received, faults.num_faults()), (DType::Bf16, 1));
        }
        Wrong::Overlap => {
            update.push_piece(&spec, 5, &tensor.data[5..9]).unwrap();
            let pushed = update.push_piece(&spec, 8, &tensor.data[8..12]);
            let error = refused(update, pushed, w1);
            assert!(matches!(error, PushError::Piece(PieceError::Overlap { .. })), "{error}");
        }
        Wrong::OutOfRange => {
            let pushed = update.push_piece(&spec, tensor.data.len() - 3, &[0; 4]);
            let error = refused(update, pushed, w1);
            assert!(matches!(error, PushError::Piece(PieceError::OutOfRange { .. })), "{error}");
        }
        _ => {
            assert_eq!(wrong, Wrong::NotFinite);
            bad.data[8..12].copy_from_slice(&f32::NAN.to_le_bytes());
            let pushed = update.push(name, &&bad);
            let expected = if bad.shape.len() == 1 { vec![2] } else { vec![0, 2] };
            match refused(update, pushed, w1) {
                PushError::Transfer(TransferError::NonFinite { tensor, index, .. }) => {
                    assert_eq!((&tensor, index), (name, expected));
                }
                error => panic!("{error}"),
            }
        }
    }
}

/// A source brings what is missing, and fails at the middle of it; tells whether anything of it can have been
/// written.
fn read_wrong(mut update: Update<'_>, (fault, at): (Fault, usize), w1: &Weights) -> bool {
    let rest = Weights(w1.0[at..].to_vec());
    let fault_at = rest.0.len() / 2;
    let mut source = Faulty { inner: rest.source(), fault, at: fault_at, reads: 0 };
    if let Fault::Panic | Fault::HalfThenPanic = fault {
        catch_unwind(AssertUnwindSafe(|| update.all(&mut source))).unwrap_err();
        assert!(matches!(update.all(&mut w1.source()), Err(PushError::Failed)));
        assert!(matches!(update.commit(), Err(CommitError::PushFailed)));
    } else {
        let pushed = update.all(&mut source);
        let error = refused(update, pushed, w1);
        assert!(matches!(error, PushError::Transfer(_)), "{error}");
    }
    // If it is the first of them, it is a matrix of several panels.
    fault_at > 0 || !matches!(fault, Fault::Error | Fault::Panic | Fault::Nothing)
}

#[test]
fn c17_c18_b23_b24_b32_b46_a_staged_update_that_goes_wrong_anywhere_changes_nothing() {
    let (w0, w1) = (weights(1), weights(2));
    let mut loaded = loaded(&w0);
    let before = known(&loaded);
    let memory = loaded.memory();
    for wrong in ALL {
        for at in [0, 1, 2, w1.0.len() / 2, w1.0.len() - 1, w1.0.len()] {
            go_wrong(&mut loaded, UpdateOptions::default(), (wrong, at), &w1);
            assert_eq!(known(&loaded), before, "{wrong:?} after {at}");
            assert_eq!(loaded.memory(), memory);
        }
    }
    let engine = wakes_like_fresh(loaded, &w0);
    let mut loaded = engine.sleep(Default::default()).unwrap().restore_weights().unwrap();
    assert_eq!(loaded.update(w1.source()).unwrap().version.counter, 2, "failed updates take no version");
    assert_wakes_like_fresh(loaded, &w1);
}

#[test]
fn c18_an_update_in_place_that_goes_wrong_anywhere_is_known_to_have_torn_or_changed_nothing() {
    let (w0, w1) = (weights(1), weights(2));
    let in_place = || UpdateOptions::default().in_place();
    let mut loaded = loaded(&w0);
    let mut healed = 0;
    for wrong in ALL {
        for at in [0, 1, w1.0.len() / 2, w1.0.len() - 1, w1.0.len()] {
            let before = known(&loaded);
            let written = go_wrong(&mut loaded, in_place(), (wrong, at), &w1);
            assert_eq!(loaded.version().is_none(), written, "{wrong:?} after {at}");
            if !written {
                assert_eq!(known(&loaded), before, "{wrong:?} after {at}");
                continue;
            }
            assert!(loaded.verify().is_err() && loaded.tensor(EMBEDDING).is_err());
            let options = if healed % 2 == 0 { in_place() } else { UpdateOptions::default() };
            let report = loaded.update_with(w0.source(), options).unwrap();
            healed += 1;
            assert_eq!(report.version.counter, 1 + healed);
            assert_eq!(report.previous.counter, healed, "of the last whole weights");
            assert_holds(&loaded, &w0);
        }
    }
    assert!(healed > 60, "{healed}");
    assert_wakes_like_fresh(loaded, &w0);
}

#[test]
fn c18_every_read_of_a_source_may_fail_in_every_manner() {
    let (w0, w1) = (weights(1), weights(2));
    let mut loaded = loaded(&w0);
    let before = known(&loaded);
    for fault in
        [Fault::Error, Fault::HalfThenError, Fault::Short, Fault::Nothing, Fault::Long, Fault::Finish]
    {
        for at in 0..w1.0.len() {
            loaded.update(Faulty { inner: w1.source(), fault, at, reads: 0 }).unwrap_err();
            assert_eq!(known(&loaded), before, "{fault:?} at {at}");
        }
    }
    for fault in [Fault::Panic, Fault::HalfThenPanic] {
        for at in 0..w1.0.len() {
            let source = Faulty { inner: w1.source(), fault, at, reads: 0 };
            catch_unwind(AssertUnwindSafe(|| loaded.update(source))).unwrap_err();
            assert_eq!(known(&loaded), before, "{fault:?} at {at}");
        }
    }
    loaded.update(w1.source()).unwrap();
    assert_wakes_like_fresh(loaded, &w1);
}

/// Every fault of one push is in its error, and no more than that push.
#[test]
fn c17_every_fault_of_a_source_is_listed() {
    let (w0, w1) = (weights(1), weights(2));
    let mut bad = w1.clone();
    get_mut(&mut bad, Q).shape.reverse();
    get_mut(&mut bad, Q).shape.push(1);
    let norm = get_mut(&mut bad, "model.norm.weight");
    *norm = encode(DType::F16, norm.shape.clone(), vec![1.0; norm.shape[0]]);
    bad.0.push(("extra.weight".into(), get(&w1, Q).clone()));
    bad.0.push(bad.0[0].clone());
    let (missing, _) = bad.0.remove(4);
    let mut loaded = loaded(&w0);
    let before = known(&loaded);
    let error = loaded.update(bad.source()).unwrap_err();
    let UpdateError::Push(PushError::Mismatch(faults)) = error else { panic!("{error}") };
    assert_eq!(faults.num_faults(), 5, "{faults}");
    assert_eq!((&faults.missing[0], faults.unknown[0].as_str()), (&missing, "extra.weight"));
    assert_eq!((faults.wrong_shape.len(), faults.wrong_dtype.len(), faults.duplicate.len()), (1, 1, 1));
    assert_eq!(known(&loaded), before);
}

/// A source that can't even be listed, or doesn't want to be read.
#[test]
fn c18_a_source_may_fail_before_its_first_read() {
    #[derive(Clone, Copy, Debug)]
    enum At {
        Index,
        Plan,
        PlanPanics,
        OtherOrder,
    }
    struct Early<S>(S, At);
    impl<S: WeightSource> WeightSource for Early<S> {
        fn index(&mut self) -> Result<Vec<TensorSpec>, SourceError> {
            match self.1 {
                At::Index => Err(SourceError::NoSuchTensor { tensor: 0, count: 0 }),
                _ => self.0.index(),
            }
        }
        fn plan(&mut self, tensors: &[usize]) -> Result<(), SourceError> {
            match self.1 {
                At::Plan => Err(SourceError::NoSuchTensor { tensor: tensors[0], count: 0 }),
                At::PlanPanics => panic!("a plan that panics"),
                _ => Ok(()),
            }
        }
        fn read(&mut self, tensor: usize, sink: &mut dyn FnMut(&[u8])) -> Result<(), SourceError> {
            // Lists its tensors in one order and reads them in another.
            self.0.read(tensor ^ 1, sink)
        }
    }
    let (w0, w1) = (weights(1), weights(2));
    let mut loaded = loaded(&w0);
    let before = known(&loaded);
    for at in [At::Index, At::Plan, At::PlanPanics, At::OtherOrder] {
        for options in [UpdateOptions::default(), UpdateOptions::default().in_place()] {
            if matches!(at, At::OtherOrder) && options.mode == UpdateMode::InPlace {
                continue;
            }
            let outcome = catch_unwind(AssertUnwindSafe(|| {
                loaded.update_with(Early(w1.source(), at), options).unwrap_err()
            }));
            match (at, outcome) {
                (At::Index, Ok(UpdateError::Push(PushError::Index(_)))) => {}
                (At::Plan, Ok(UpdateError::Push(PushError::Transfer(TransferError::Source(_))))) => {}
                (At::OtherOrder, Ok(UpdateError::Push(PushError::Transfer(error)))) => {
                    assert!(matches!(error, TransferError::WrongLength { .. }), "{error}");
                }
                (At::PlanPanics, Err(_)) => {}
                (_, outcome) => panic!("{at:?} gave {outcome:?}"),
            }
            assert_eq!(known(&loaded), before, "{at:?}");
        }
    }
    loaded.update(w1.source()).unwrap();
    assert_holds(&loaded, &w1);
}
