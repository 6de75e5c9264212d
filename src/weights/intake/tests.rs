//! Weights in any order and any split against a naive model, and every way to be refused.

use std::collections::BTreeSet;

use proptest::prelude::*;

use super::*;
use crate::device::cpu::{CpuDevice, CpuOptions, SimdPath};
use crate::model::ModelConfig;
use crate::weights::layout::Place;
use crate::weights::resident::read_rows;
use crate::weights::{BucketEntry, DType, NameMap, SourceError, TensorSet, WeightTensor as Sent};

const EMBEDDING: &str = "model.embed_tokens.weight";
const HEAD: &str = "lm_head.weight";
const NORM: &str = "model.norm.weight";

fn source<'a>(tensors: impl IntoIterator<Item = &'a Sent>) -> TensorSet<&'a Sent> {
    TensorSet::new(tensors.into_iter().map(|sent| (sent.spec.name.clone(), sent)))
}

struct Rng(u64);

impl Rng {
    fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut x = self.0;
        x = (x ^ (x >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        x = (x ^ (x >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        x ^ (x >> 31)
    }
    fn below(&mut self, end: usize) -> usize {
        (self.next() % end as u64) as usize
    }
    fn one_in(&mut self, n: usize) -> bool {
        self.below(n) == 0
    }
    fn shuffle<T>(&mut self, items: &mut [T]) {
        (1..items.len()).for_each(|i| items.swap(i, self.below(i + 1)));
    }
    /// Elements of a finite value each.
    fn elements(&mut self, dtype: DType, count: usize) -> Vec<u8> {
        let values = (0..count).map(|_| (self.next() >> 40) as f32 / (1u64 << 23) as f32 - 1.0);
        encode(dtype, values)
    }
}

fn encode(dtype: DType, values: impl IntoIterator<Item = f32>) -> Vec<u8> {
    let one = |value: f32| match dtype {
        DType::F32 => value.to_le_bytes().to_vec(),
        DType::F16 => half::f16::from_f32(value).to_le_bytes().to_vec(),
        DType::Bf16 => half::bf16::from_f32(value).to_le_bytes().to_vec(),
    };
    values.into_iter().flat_map(one).collect()
}

/// The elements in another dtype, by the `half` crate.
fn rounded(from: DType, bytes: &[u8], to: DType) -> Vec<u8> {
    if from == to {
        return bytes.to_vec();
    }
    let widened = bytes.chunks_exact(from.size()).map(|element| match from {
        DType::F32 => f32::from_le_bytes(element.try_into().unwrap()),
        DType::F16 => half::f16::from_le_bytes(element.try_into().unwrap()).to_f32(),
        DType::Bf16 => half::bf16::from_le_bytes(element.try_into().unwrap()).to_f32(),
    });
    encode(to, widened)
}

/// Rows and columns that are no multiple of anything; biases; fused parts that share a panel.
fn config(tied: bool, vocabulary: usize, hidden: usize) -> ModelConfig {
    ModelConfig::from_json(&format!(
        r#"{{"architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": {hidden},
        "intermediate_size": 10, "num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 1,
        "head_dim": 6, "attention_bias": true, "mlp_bias": true, "max_position_embeddings": 64,
        "rms_norm_eps": 1e-5, "rope_theta": 10000.0, "vocab_size": {vocabulary}, "hidden_act": "silu",
        "eos_token_id": 0, "tie_word_embeddings": {tied}}}"#
    ))
    .unwrap()
}

fn shape_of(config: &ModelConfig, dtype: impl FnMut(&str) -> DType) -> IntakeShape {
    let options = CpuOptions { threads: 2, simd: SimdPath::Auto, memory_limit_bytes: None };
    let device: Arc<dyn Device> = Arc::new(CpuDevice::new(options).unwrap());
    let manifest = Manifest::with_dtypes(config, dtype);
    let layout = WeightLayout::new(config, &manifest, &*device).unwrap();
    IntakeShape { device, manifest: Arc::new(manifest), layout: Arc::new(layout) }
}

fn tiny(tied: bool, dtype: DType) -> IntakeShape {
    shape_of(&config(tied, 21, 7), |_| dtype)
}

fn arena(shape: &IntakeShape) -> Arena {
    let mut arena = shape.device.reserve("weights", shape.layout.bytes).unwrap();
    arena.commit(shape.layout.bytes).unwrap();
    arena
}

fn contents(shape: &IntakeShape, arena: &Arena) -> Vec<u8> {
    let mut out = vec![0; shape.layout.bytes];
    shape.device.read_bytes(arena.view(0, shape.layout.bytes), &mut out).unwrap();
    out
}

/// What the arena holds, in Hugging Face layout.
fn read_back(shape: &IntakeShape, arena: &Arena) -> Vec<Sent> {
    let tensors = shape.manifest.tensors().iter().zip(&shape.layout.places);
    let read = |(spec, place): (&TensorSpec, &Place)| {
        let mut data = vec![0; spec.checked_bytes().unwrap()];
        read_rows(&*shape.device, &shape.layout, arena, *place, 0, &mut data).unwrap();
        Sent { spec: spec.clone(), data }
    };
    tensors.map(read).collect()
}

/// A complete set in the resident dtypes.
fn complete(shape: &IntakeShape, rng: &mut Rng) -> Vec<Sent> {
    let sent = |spec: &TensorSpec| {
        let data = rng.elements(spec.dtype, spec.shape.iter().product());
        Sent { spec: spec.clone(), data }
    };
    shape.manifest.tensors().iter().map(sent).collect()
}

fn find<'a>(tensors: &'a mut [Sent], name: &str) -> &'a mut Sent {
    tensors.iter_mut().find(|sent| sent.spec.name == name).unwrap()
}

fn digest(tensors: &[Sent]) -> WeightsDigest {
    WeightsDigest::of(&mut source(tensors)).unwrap()
}

/// The tensors of a manifest as they should be resident.
fn expected(shape: &IntakeShape, sent: &[Sent], names: &NameMap) -> Vec<Sent> {
    let one = |spec: &TensorSpec| {
        let sent = sent.iter().find(|s| names.apply(&s.spec.name).as_ref() == Some(&spec.name)).unwrap();
        let elements: usize = spec.shape.iter().product();
        let kept = &sent.data[..elements * sent.spec.dtype.size()];
        Sent { spec: spec.clone(), data: rounded(sent.spec.dtype, kept, spec.dtype) }
    };
    shape.manifest.tensors().iter().map(one).collect()
}

/// The reference: one push of everything into fresh memory.
fn at_once(shape: &IntakeShape, options: &LoadOptions, sent: &[Sent]) -> (Received, Vec<u8>) {
    let mut memory = arena(shape);
    let mut intake = Intake::complete(shape.clone(), options.clone());
    intake.push_all(&mut memory, &mut source(sent), true).unwrap();
    (intake.finish().unwrap(), contents(shape, &memory))
}

/// A piece of a tensor: which, begin, end.
type Piece = (usize, usize, usize);

/// Cuts a tensor into pieces, some of one byte, some empty.
fn cut_up(rng: &mut Rng, tensor: usize, sent: &Sent) -> Vec<Piece> {
    let len = sent.data.len();
    let unit = if rng.one_in(2) { sent.spec.dtype.size() } else { 1 };
    let mut cuts: BTreeSet<usize> = match rng.below(4) {
        0 => (0..len).step_by(unit).collect(),
        cuts => (0..cuts * 3).map(|_| rng.below(len / unit + 1) * unit).collect(),
    };
    cuts.extend([0, len]);
    let cuts: Vec<usize> = cuts.into_iter().collect();
    cuts.windows(2).map(|pair| (tensor, pair[0], pair[1])).collect()
}

/// What pieces wait in host memory for, byte by byte.
#[derive(Default)]
struct Waiting {
    arrived: Vec<Vec<bool>>,
    peak: u64,
}

impl Waiting {
    fn take(&mut self, (tensor, begin, end): Piece) {
        self.arrived[tensor][begin..end].fill(true);
        let waiting = self.arrived.iter().map(|bytes| {
            let front = bytes.iter().take_while(|arrived| **arrived).count();
            bytes[front..].iter().filter(|arrived| **arrived).count() as u64
        });
        self.peak = self.peak.max(waiting.sum());
    }
}

/// Sends everything, each tensor in one of the ways there are, mixed.
fn send_mixed(intake: &mut Intake, memory: &mut Arena, sent: &[Sent], rng: &mut Rng) -> u64 {
    let mut waiting = Waiting { arrived: sent.iter().map(|s| vec![false; s.data.len()]).collect(), peak: 0 };
    let mut pieces: Vec<Piece> = Vec::new();
    let mut sets: Vec<Vec<usize>> = Vec::new();
    for (tensor, whole) in sent.iter().enumerate() {
        match rng.below(6) {
            0 => sets.push(vec![tensor]),
            1 if !sets.is_empty() => {
                let set = rng.below(sets.len());
                sets[set].push(tensor);
            }
            _ => pieces.extend(cut_up(rng, tensor, whole)),
        }
    }
    match rng.below(3) {
        0 => pieces.reverse(),
        1 => rng.shuffle(&mut pieces),
        // Nearly in order: neighbours change places.
        _ => (1..pieces.len()).for_each(|i| pieces.swap(i, i - rng.below(2))),
    }
    let mut left = &pieces[..];
    while !left.is_empty() || !sets.is_empty() {
        if !sets.is_empty() && (left.is_empty() || rng.one_in(3)) {
            let set = sets.pop().unwrap();
            match set[..] {
                [tensor] if rng.one_in(2) => {
                    intake.push(memory, &sent[tensor].spec.name, &&sent[tensor]).unwrap();
                }
                _ => intake
                    .push_all(memory, &mut source(set.iter().map(|&tensor| &sent[tensor])), false)
                    .unwrap(),
            }
            continue;
        }
        let (now, later) = left.split_at(left.len().min(1 + rng.below(9)));
        left = later;
        send_pieces(intake, memory, sent, now, rng);
        now.iter().for_each(|&piece| waiting.take(piece));
    }
    waiting.peak
}

fn send_pieces(intake: &mut Intake, memory: &mut Arena, sent: &[Sent], pieces: &[Piece], rng: &mut Rng) {
    let whole_elements = |&(tensor, begin, end): &Piece| {
        let size = sent[tensor].spec.dtype.size();
        begin < end && begin % size == 0 && end % size == 0
    };
    if pieces.iter().all(whole_elements) && rng.one_in(2) {
        let mut data = Vec::new();
        let mut entry = |&(tensor, begin, end): &Piece| {
            let at = data.len();
            data.extend_from_slice(&sent[tensor].data[begin..end]);
            BucketEntry { tensor: sent[tensor].spec.clone(), offset: begin, range: at..data.len() }
        };
        let entries = pieces.iter().map(&mut entry).collect();
        intake.push_bucket(memory, &Bucket::new(entries, &data).unwrap()).unwrap();
        return;
    }
    for &(tensor, begin, end) in pieces {
        // At any address, and gone when the push returns.
        let mut bytes = vec![0xa5; rng.below(8)];
        let skipped = bytes.len();
        bytes.extend_from_slice(&sent[tensor].data[begin..end]);
        intake.push_piece(memory, &sent[tensor].spec, begin, &bytes[skipped..]).unwrap();
        bytes.fill(0x5a);
        if rng.one_in(4) {
            let offset = rng.below(sent[tensor].data.len() + 1);
            if matches!(intake.resolve([&sent[tensor].spec]), Ok(targets) if targets.len() == 1) {
                intake.push_piece(memory, &sent[tensor].spec, offset, &[]).unwrap();
            }
        }
    }
}

/// A case of the property below.
#[derive(Debug, Clone)]
struct Case {
    tied: bool,
    /// Resident.
    dtype: Option<DType>,
    convert: bool,
    wrapped: bool,
    padding: [usize; 2],
    head: bool,
    seed: u64,
}

fn case() -> impl Strategy<Value = Case> {
    let dtype = prop_oneof![
        Just(Some(DType::F32)),
        Just(Some(DType::F16)),
        Just(Some(DType::Bf16)),
        Just(None), // bf16 matrices, f32 vectors
    ];
    let bools = (any::<bool>(), any::<bool>(), any::<bool>(), any::<bool>());
    (bools, dtype, [0..4usize, 0..20usize], any::<u64>()).prop_map(
        |((tied, convert, wrapped, head), dtype, padding, seed)| Case {
            tied,
            dtype,
            convert,
            wrapped,
            padding,
            head,
            seed,
        },
    )
}

/// A set as the case says, to be sent; all of it is acceptable under the options.
fn sent_for(case: &Case, shape: &IntakeShape, rng: &mut Rng) -> (Vec<Sent>, LoadOptions) {
    const DTYPES: [DType; 3] = [DType::F32, DType::F16, DType::Bf16];
    let mut sent: Vec<Sent> = Vec::new();
    for spec in shape.manifest.tensors() {
        let mut spec = spec.clone();
        if case.convert {
            spec.dtype = DTYPES[rng.below(3)];
        }
        if [EMBEDDING, HEAD].contains(&spec.name.as_str()) {
            spec.shape[0] += case.padding[0];
        }
        let data = rng.elements(spec.dtype, spec.shape.iter().product());
        sent.push(Sent { spec, data });
    }
    if case.tied && case.head {
        // Equal where it counts.
        let mut head = sent[0].clone();
        head.spec.name = HEAD.into();
        let rows = head.spec.shape[0];
        let row_bytes = head.data.len() / rows;
        head.data.truncate((rows - case.padding[0]) * row_bytes);
        head.spec.shape[0] = rows - case.padding[0] + case.padding[1];
        let padding = rng.elements(head.spec.dtype, case.padding[1] * head.spec.shape[1]);
        head.data.extend(padding);
        sent.push(head);
    }
    let mut options = LoadOptions {
        convert_dtypes: case.convert,
        trim_vocab_padding: case.padding != [0, 0],
        require_finite: rng.one_in(2),
        ..LoadOptions::default()
    };
    if case.wrapped {
        options.names = NameMap::wrappers();
        for tensor in &mut sent {
            let name = &tensor.spec.name;
            tensor.spec.name = match rng.below(3) {
                0 => format!("module.module.{name}"),
                1 => name.replace("layers.", "_orig_mod.layers."),
                _ => name.clone(),
            };
        }
    }
    rng.shuffle(&mut sent);
    (sent, options)
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 192, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn c29_b27_any_order_and_split_is_one_push_of_everything(case in case()) {
        let vector = |name: &str| name.contains("norm") || name.ends_with("bias");
        let dtype = |name: &str| match case.dtype {
            Some(dtype) => dtype,
            None if vector(name) => DType::F32,
            None => DType::Bf16,
        };
        let shape = shape_of(&config(case.tied, 21, 7), dtype);
        let mut rng = Rng(case.seed);
        let (sent, options) = sent_for(&case, &shape, &mut rng);
        let expected = expected(&shape, &sent, &options.names);

        let (reference, reference_contents) = at_once(&shape, &options, &sent);
        prop_assert_eq!(reference.digest, digest(&expected), "as computed without an intake");
        prop_assert_eq!(reference.peak_waiting_bytes, 0);
        let sent_bytes: usize = sent.iter().map(|s| s.data.len()).sum();

        let mut memory = arena(&shape);
        let mut intake = Intake::complete(shape.clone(), options.clone().expect_digest(reference.digest));
        let peak = send_mixed(&mut intake, &mut memory, &sent, &mut rng);
        let received = intake.finish().unwrap();
        prop_assert_eq!(&received.digests, &reference.digests);
        prop_assert_eq!(received.digest, reference.digest);
        prop_assert_eq!(received.received_bytes, sent_bytes as u64);
        prop_assert_eq!(reference.received_bytes, sent_bytes as u64);
        prop_assert_eq!(received.tensors, shape.manifest.tensors().len());
        prop_assert_eq!(received.peak_waiting_bytes, peak);
        prop_assert!(contents(&shape, &memory) == reference_contents);
        prop_assert!(read_back(&shape, &memory) == expected);
    }

    /// Whatever is pushed, in any order, right or wrong: never a panic, and `finish` never takes what is not
    /// a whole set.
    #[test]
    fn c17_b48_random_pieces_are_whole_or_refused(
        pieces in prop::collection::vec((0..9usize, 0..700usize, 0..700usize, 0..40u8), 0..30),
        rest in any::<bool>(),
    ) {
        let shape = tiny(true, DType::F16);
        let sent = complete(&shape, &mut Rng(3));
        let mut memory = arena(&shape);
        let mut intake = Intake::complete(shape.clone(), LoadOptions::default());
        let mut arrived: Vec<Vec<bool>> = sent.iter().map(|s| vec![false; s.data.len()]).collect();
        let mut failed = false;
        for (tensor, offset, len, wrong) in pieces {
            let Sent { mut spec, data } = sent[tensor].clone();
            let (offset, len) = (offset % (data.len() + 1), len % (data.len() / 4 + 2));
            match wrong {
                0 => spec.dtype = DType::Bf16,
                1 => spec.shape.push(1),
                2 => spec.name.push('x'),
                _ => {}
            }
            let end = offset + len;
            let fits = end <= data.len();
            let bytes = if fits { data[offset..end].to_vec() } else { vec![7; len] };
            let free = fits && arrived[tensor][offset..end].iter().all(|arrived| !arrived);
            let done = arrived[tensor].iter().all(|arrived| *arrived);
            let good = !failed && wrong > 2 && free && !done;
            let pushed = intake.push_piece(&mut memory, &spec, offset, &bytes);
            prop_assert_eq!(pushed.is_ok(), good, "{:?}", pushed);
            match pushed {
                Ok(()) => arrived[tensor][offset..end].fill(true),
                Err(error) => {
                    prop_assert_eq!(matches!(error, PushError::Failed), failed);
                    failed = true;
                }
            }
        }
        if rest && !failed {
            // The gaps, backwards.
            for (tensor, bytes) in arrived.iter_mut().enumerate() {
                for at in (0..bytes.len()).rev().filter(|&at| !bytes[at]) {
                    let Sent { spec, data } = &sent[tensor];
                    intake.push_piece(&mut memory, spec, at, &data[at..=at]).unwrap();
                }
                bytes.fill(true);
            }
        }
        let whole = arrived.iter().flatten().all(|arrived| *arrived);
        match intake.finish() {
            Ok(received) => {
                prop_assert!(whole && !failed);
                prop_assert_eq!(received.digest, digest(&sent));
                prop_assert!(read_back(&shape, &memory) == sent);
            }
            Err(FinishError::Failed) => prop_assert!(failed),
            Err(FinishError::Mismatch(faults)) => {
                prop_assert!(!whole && !failed);
                for (tensor, bytes) in arrived.iter().enumerate() {
                    let name = &sent[tensor].spec.name;
                    let count = bytes.iter().filter(|arrived| **arrived).count() as u64;
                    let incomplete = faults.incomplete.iter().find(|fault| fault.name == *name);
                    let expected = (count > 0 && count < bytes.len() as u64).then_some(count);
                    prop_assert_eq!(incomplete.map(|fault| fault.received_bytes), expected);
                    prop_assert_eq!(faults.missing.contains(name), count == 0);
                }
            }
            Err(error) => prop_assert!(false, "{:?}", error),
        }
    }
}

/// An intake, its memory, and a complete set.
fn begun(options: LoadOptions) -> (Intake, Arena, Vec<Sent>) {
    let shape = tiny(false, DType::F32);
    let sent = complete(&shape, &mut Rng(1));
    let memory = arena(&shape);
    (Intake::complete(shape, options), memory, sent)
}

fn piece_error(pushes: &[(usize, usize)], last: impl FnOnce(&mut TensorSpec)) -> PieceError {
    let (mut intake, mut memory, sent) = begun(LoadOptions::default());
    let mut spec = sent[0].spec.clone();
    let (&(offset, len), good) = pushes.split_last().unwrap();
    for &(offset, len) in good {
        intake.push_piece(&mut memory, &spec, offset, &vec![0; len]).unwrap();
    }
    last(&mut spec);
    let error = intake.push_piece(&mut memory, &spec, offset, &vec![0; len]).unwrap_err();
    assert!(matches!(intake.finish(), Err(FinishError::Failed)));
    let PushError::Piece(error) = error else { panic!("{error}") };
    error
}

#[test]
fn c17_a_piece_that_overlaps_another_is_refused() {
    // 21 rows of 7 f32: 588 bytes. Arrived: the front, and two pieces that wait.
    let before = [(0, 10), (40, 20), (100, 8)];
    let overlapping =
        [(0, 1), (9, 1), (9, 31), (10, 31), (30, 11), (40, 20), (45, 2), (59, 1), (39, 22), (99, 10)];
    for piece in overlapping.into_iter().chain([(60, 41), (107, 1), (0, 588), (10, 578)]) {
        let error = piece_error(&[&before[..], &[piece]].concat(), |_| ());
        let (offset, bytes) = piece;
        assert_eq!(error, PieceError::Overlap { tensor: EMBEDDING.into(), offset, bytes }, "{piece:?}");
    }
    let (mut intake, mut memory, sent) = begun(LoadOptions::default());
    for (offset, len) in before.into_iter().chain([(10, 30), (60, 40), (108, 480)]) {
        let bytes = &sent[0].data[offset..offset + len];
        intake.push_piece(&mut memory, &sent[0].spec, offset, bytes).unwrap();
    }
    assert!(matches!(intake.slots[0], Slot::Done(_)), "pieces that only touch fit");
}

#[test]
fn c17_b38_a_piece_beyond_the_end_is_refused_whatever_the_numbers() {
    for (offset, len) in [(588, 1), (587, 2), (0, 589), (usize::MAX, 1), (usize::MAX, 0), (589, 0)] {
        let error = piece_error(&[(offset, len)], |_| ());
        let expected =
            PieceError::OutOfRange { tensor: EMBEDDING.into(), offset, bytes: len, tensor_bytes: 588 };
        assert_eq!(error, expected);
    }
}

#[test]
fn c17_pieces_of_one_tensor_agree_in_dtype_and_shape() {
    let (mut intake, mut memory, mut sent) =
        begun(LoadOptions::default().convert_dtypes().trim_vocab_padding());
    let spec = sent[0].spec.clone();
    intake.push_piece(&mut memory, &spec, 4, &[0; 4]).unwrap();
    let other = TensorSpec { shape: vec![22, 7], ..spec.clone() };
    let error = intake.push_piece(&mut memory, &other, 8, &[0; 4]).unwrap_err();
    assert_eq!(error.to_string(), format!("{EMBEDDING}: f32 [22, 7], in an earlier piece f32 [21, 7]"));
    let (mut intake, mut memory, _) = begun(LoadOptions::default().convert_dtypes());
    intake.push_piece(&mut memory, &spec, 0, &[0; 4]).unwrap();
    let other = TensorSpec { dtype: DType::Bf16, ..spec };
    let error = intake.push_piece(&mut memory, &other, 8, &[0; 4]).unwrap_err();
    assert!(matches!(error, PushError::Piece(PieceError::Conflict { .. })), "{error}");
    // A whole tensor after a piece of it overlaps.
    let (mut intake, mut memory, _) = begun(LoadOptions::default());
    let embedding = find(&mut sent, EMBEDDING);
    intake.push_piece(&mut memory, &embedding.spec, 80, &[0; 4]).unwrap();
    let error = intake.push(&mut memory, EMBEDDING, &&*embedding).unwrap_err();
    assert!(matches!(error, PushError::Piece(PieceError::Overlap { offset: 0, bytes: 588, .. })), "{error}");
}

#[test]
fn pieces_that_wait_are_limited_in_number() {
    let shape = shape_of(&config(true, 5000, 7), |_| DType::F32);
    let mut memory = arena(&shape);
    let mut intake = Intake::complete(shape.clone(), LoadOptions::default());
    let spec = shape.manifest.tensors()[0].clone();
    for i in 0..65_536 {
        intake.push_piece(&mut memory, &spec, 2 + 2 * i, &[1]).unwrap();
    }
    assert_eq!((intake.waiting_bytes, intake.peak_waiting_bytes), (65_536, 65_536));
    let error = intake.push_piece(&mut memory, &spec, 132_000, &[1]).unwrap_err();
    let PushError::Piece(PieceError::TooManyWaiting { tensor, limit: 65_536 }) = error else {
        panic!("{error}")
    };
    assert_eq!(tensor, EMBEDDING);
    // One that goes to the front is no matter.
    let mut intake = Intake::complete(shape, LoadOptions::default());
    for i in 0..65_536 {
        intake.push_piece(&mut memory, &spec, 2 + 2 * i, &[1]).unwrap();
    }
    for at in [0, 1, 3, 5] {
        intake.push_piece(&mut memory, &spec, at, &[1]).unwrap();
    }
    assert_eq!((intake.waiting_bytes, intake.peak_waiting_bytes), (65_533, 65_536));
}

#[test]
fn b42_two_names_for_one_tensor_are_a_duplicate() {
    let options = LoadOptions::default().names(NameMap::wrappers());
    let (mut intake, mut memory, sent) = begun(options.clone());
    let mut twin = sent[0].clone();
    twin.spec.name = format!("module.{EMBEDDING}");
    let both = [sent[0].clone(), twin.clone()];
    let duplicate = |error: PushError| {
        let PushError::Mismatch(faults) = error else { panic!("{error}") };
        assert_eq!((faults.num_faults(), faults.duplicate.len()), (1, 1), "{faults}");
        faults.duplicate[0].clone()
    };
    let error = intake.push_all(&mut memory, &mut source(&both), false).unwrap_err();
    assert_eq!(duplicate(error), twin.spec.name);
    // One after the other.
    let (mut intake, mut memory, _) = begun(options.clone());
    intake.push(&mut memory, EMBEDDING, &&sent[0]).unwrap();
    assert_eq!(duplicate(intake.push(&mut memory, &twin.spec.name, &&twin).unwrap_err()), twin.spec.name);
    // In one bucket, whole.
    let (mut intake, mut memory, _) = begun(options.clone());
    let data = [&sent[0].data[..], &twin.data].concat();
    let entry = |tensor: &TensorSpec, range| BucketEntry { tensor: tensor.clone(), offset: 0, range };
    let entries = vec![entry(&sent[0].spec, 0..588), entry(&twin.spec, 588..1176)];
    let error = intake.push_bucket(&mut memory, &Bucket::new(entries, &data).unwrap()).unwrap_err();
    assert_eq!(duplicate(error), twin.spec.name);
    assert!(matches!(intake.slots[0], Slot::Empty), "nothing of a bucket with a fault is stored");
    // Two halves under two names are no tensor: in one bucket, piece by piece, and the first one early.
    let (first, second) = (&sent[0].data[..292], &sent[0].data[292..]);
    let (mut intake, mut memory, _) = begun(options.clone());
    let entries =
        vec![entry(&sent[0].spec, 0..292), BucketEntry { offset: 292, ..entry(&twin.spec, 292..588) }];
    let error = intake.push_bucket(&mut memory, &Bucket::new(entries, &sent[0].data).unwrap()).unwrap_err();
    assert_eq!(duplicate(error), twin.spec.name);
    for [(offset, piece), (other_offset, other)] in [[(0, first), (292, second)], [(292, second), (0, first)]]
    {
        let (mut intake, mut memory, _) = begun(options.clone());
        intake.push_piece(&mut memory, &sent[0].spec, offset, piece).unwrap();
        let error = intake.push_piece(&mut memory, &twin.spec, other_offset, other).unwrap_err();
        assert_eq!(duplicate(error), twin.spec.name);
    }
}

#[test]
fn an_empty_piece_is_no_part_of_a_tensor() {
    let (mut intake, mut memory, sent) = begun(LoadOptions::default());
    for offset in [0, 100, 588] {
        intake.push_piece(&mut memory, &sent[0].spec, offset, &[]).unwrap();
    }
    // Not begun: a source may still bring it, and it is missing, not incomplete.
    let (mut other, mut other_memory, _) = begun(LoadOptions::default());
    other.push_piece(&mut other_memory, &sent[0].spec, 0, &[]).unwrap();
    let Err(FinishError::Mismatch(faults)) = other.finish() else { panic!("nothing has arrived") };
    assert_eq!((faults.missing.len(), faults.incomplete.len()), (sent.len(), 0));
    intake.push_all(&mut memory, &mut source(&sent), true).unwrap();
    assert_eq!(intake.finish().unwrap().digest, digest(&sent));
}

#[test]
fn c07_what_is_missing_and_what_is_there_in_part_is_listed() {
    let (mut intake, mut memory, sent) = begun(LoadOptions::default());
    let norm = sent.iter().find(|s| s.spec.name == NORM).unwrap();
    intake.push_piece(&mut memory, &norm.spec, 4, &norm.data[4..12]).unwrap();
    intake.push_piece(&mut memory, &norm.spec, 0, &norm.data[..1]).unwrap();
    for tensor in sent.iter().filter(|s| ![NORM, HEAD, EMBEDDING].contains(&s.spec.name.as_str())) {
        intake.push(&mut memory, &tensor.spec.name, &tensor).unwrap();
    }
    let Err(FinishError::Mismatch(faults)) = intake.finish() else { panic!("not all has arrived") };
    assert_eq!(faults.missing, [EMBEDDING, HEAD]);
    let part = Incomplete { name: NORM.into(), expected_bytes: 28, received_bytes: 9 };
    assert_eq!((faults.incomplete.as_slice(), faults.num_faults()), (&[part][..], 3));
    assert!(faults.to_string().contains("model.norm.weight (9 of 28 bytes)"), "{faults}");
}

#[test]
fn b32_b46_after_a_push_that_failed_every_further_one_is_refused() {
    let (mut intake, mut memory, sent) = begun(LoadOptions::default());
    intake.push_all(&mut memory, &mut source(&sent[1..]), false).unwrap();
    let unknown = TensorSpec { name: "x".into(), ..sent[0].spec.clone() };
    assert!(matches!(intake.push_piece(&mut memory, &unknown, 0, &[0]), Err(PushError::Mismatch(_))));
    let refused = [
        intake.push(&mut memory, EMBEDDING, &&sent[0]),
        intake.push_piece(&mut memory, &sent[0].spec, 0, &sent[0].data),
        intake.push_all(&mut memory, &mut source(&sent[..1]), false),
        intake.push_bucket(&mut memory, &Bucket::new(vec![], &[]).unwrap()),
        intake.push_resident(&mut memory, 0, 0, &sent[0].data),
    ];
    assert!(refused.iter().all(|pushed| matches!(pushed, Err(PushError::Failed))), "{refused:?}");
    assert!(matches!(intake.finish(), Err(FinishError::Failed)));
}

#[test]
fn c18_a_source_that_panics_ends_the_transaction() {
    struct Panics;
    impl WeightSource for Panics {
        fn index(&mut self) -> Result<Vec<TensorSpec>, SourceError> {
            panic!("a source that panics");
        }
        fn read(&mut self, _: usize, _: &mut dyn FnMut(&[u8])) -> Result<(), SourceError> {
            unreachable!()
        }
    }
    let (mut intake, mut memory, sent) = begun(LoadOptions::default());
    let push = std::panic::AssertUnwindSafe(|| intake.push_all(&mut memory, &mut Panics, false));
    std::panic::catch_unwind(push).unwrap_err();
    assert!(matches!(intake.push_all(&mut memory, &mut source(&sent), true), Err(PushError::Failed)));
    assert!(matches!(intake.finish(), Err(FinishError::Failed)));
}

#[test]
fn c17_a_bucket_with_a_fault_stores_nothing() {
    let (mut intake, mut memory, sent) = begun(LoadOptions::default());
    let shape = intake.shape.clone();
    let mut unknown = sent[2].clone();
    unknown.spec.name = "model.layers.9.mlp.up_proj.weight".into();
    let mut transposed = sent[1].clone();
    transposed.spec.shape.reverse();
    let tensors = [&sent[0], &unknown, &transposed, &sent[3]];
    let data: Vec<u8> = tensors.iter().flat_map(|s| s.data.clone()).collect();
    let mut at = 0;
    let entries = tensors.map(|s| {
        at += s.data.len();
        BucketEntry { tensor: s.spec.clone(), offset: 0, range: at - s.data.len()..at }
    });
    let bucket = Bucket::new(entries.to_vec(), &data).unwrap();
    let PushError::Mismatch(faults) = intake.push_bucket(&mut memory, &bucket).unwrap_err() else { panic!() };
    assert_eq!((faults.unknown.len(), faults.wrong_shape.len(), faults.num_faults()), (1, 1, 2));
    assert!(contents(&shape, &memory).iter().all(|byte| *byte == 0), "nothing was written");
}

fn non_finite(error: PushError) -> (String, Vec<usize>, f32) {
    let PushError::Transfer(TransferError::NonFinite { tensor, index, value }) = error else {
        panic!("{error}")
    };
    (tensor, index, value)
}

#[test]
fn the_first_value_that_is_no_number_is_named() {
    let poke = |sent: &mut Sent, element: usize, value: f32| {
        let size = sent.spec.dtype.size();
        sent.data[element * size..][..size].copy_from_slice(&encode(sent.spec.dtype, [value]));
    };
    for element in [0, 6, 7, 111, 146] {
        let (mut intake, mut memory, mut sent) = begun(LoadOptions::default().require_finite());
        let embedding = find(&mut sent, EMBEDDING);
        poke(embedding, element, f32::NEG_INFINITY);
        poke(embedding, 146, f32::NAN);
        // In pieces of one byte it is found when its panel is complete.
        let (spec, data) = (embedding.spec.clone(), embedding.data.clone());
        let pushed = data
            .iter()
            .enumerate()
            .try_for_each(|(at, byte)| intake.push_piece(&mut memory, &spec, at, std::slice::from_ref(byte)));
        let (tensor, index, value) = non_finite(pushed.unwrap_err());
        assert_eq!((tensor.as_str(), index), (EMBEDDING, vec![element / 7, element % 7]));
        assert!(if element == 146 { value.is_nan() } else { value == f32::NEG_INFINITY });
        let mut again = Intake::complete(intake.shape.clone(), LoadOptions::default().require_finite());
        let (tensor, index, _) =
            non_finite(again.push_all(&mut memory, &mut source(&sent), true).unwrap_err());
        assert_eq!((tensor.as_str(), index), (EMBEDDING, vec![element / 7, element % 7]));
        // Without the option it is stored as it is.
        let mut lax = Intake::complete(intake.shape.clone(), LoadOptions::default());
        lax.push_all(&mut memory, &mut source(&sent), true).unwrap();
        assert_eq!(lax.finish().unwrap().digest, digest(&sent));
    }
    let (mut intake, mut memory, mut sent) = begun(LoadOptions::default().require_finite());
    poke(find(&mut sent, NORM), 3, f32::NAN);
    let (tensor, index, _) = non_finite(intake.push_all(&mut memory, &mut source(&sent), true).unwrap_err());
    assert_eq!((tensor.as_str(), index), (NORM, vec![3]), "of a vector, the element");
}

#[test]
fn what_overflows_in_the_engines_dtype_is_not_finite() {
    let shape = tiny(false, DType::F16);
    let mut sent = complete(&shape, &mut Rng(1));
    let embedding = find(&mut sent, EMBEDDING);
    embedding.spec.dtype = DType::F32;
    let mut values = vec![1.0; 147];
    (values[40], values[50], values[60]) = (65_519.0, 65_520.0, f32::MAX);
    embedding.data = encode(DType::F32, values);
    let options = LoadOptions::default().convert_dtypes();
    let mut memory = arena(&shape);
    let mut intake = Intake::complete(shape.clone(), options.clone().require_finite());
    let (tensor, index, value) =
        non_finite(intake.push_all(&mut memory, &mut source(&sent), true).unwrap_err());
    assert_eq!((tensor.as_str(), index, value), (EMBEDDING, vec![7, 1], f32::INFINITY));
    let mut lax = Intake::complete(shape, options);
    lax.push_all(&mut memory, &mut source(&sent), true).unwrap();
    lax.finish().unwrap();
}

#[test]
fn padding_is_dropped_before_anything_looks_at_it() {
    let shape = tiny(false, DType::F32);
    let sent = complete(&shape, &mut Rng(1));
    let mut padded = sent.clone();
    for name in [EMBEDDING, HEAD] {
        let tensor = find(&mut padded, name);
        tensor.spec.shape[0] += 3;
        tensor.data.extend(encode(DType::F32, vec![f32::NAN; 21]));
    }
    let options = LoadOptions::default().trim_vocab_padding().require_finite();
    assert_eq!(at_once(&shape, &options, &padded), at_once_but_received(&shape, &options, &sent, 2 * 84));
    // All of the padding must arrive.
    let mut memory = arena(&shape);
    let mut intake = Intake::complete(shape.clone(), options);
    intake.push_all(&mut memory, &mut source(&padded[1..]), false).unwrap();
    intake.push_piece(&mut memory, &padded[0].spec, 0, &padded[0].data[..671]).unwrap();
    let Err(FinishError::Mismatch(faults)) = intake.finish() else { panic!("a byte is missing") };
    assert_eq!((faults.incomplete[0].received_bytes, faults.incomplete[0].expected_bytes), (671, 672));
    // Without the option it is a wrong shape, and so are missing rows with it, and padding of other tensors.
    let refused = |options: LoadOptions, sent: &[Sent]| {
        let mut intake = Intake::complete(shape.clone(), options);
        let error = intake.push_all(&mut arena(&shape), &mut source(sent), true).unwrap_err();
        let PushError::Mismatch(faults) = error else { panic!("{error}") };
        faults.wrong_shape.len()
    };
    assert_eq!(refused(LoadOptions::default(), &padded), 2);
    let mut short = sent.clone();
    let embedding = find(&mut short, EMBEDDING);
    embedding.spec.shape[0] -= 1;
    embedding.data.truncate(20 * 28);
    let norm = find(&mut short, NORM);
    norm.spec.shape[0] += 1;
    norm.data.extend([0; 4]);
    assert_eq!(refused(LoadOptions::default().trim_vocab_padding(), &short), 2);
}

fn at_once_but_received(
    shape: &IntakeShape,
    options: &LoadOptions,
    sent: &[Sent],
    more: u64,
) -> (Received, Vec<u8>) {
    let (received, contents) = at_once(shape, options, sent);
    (Received { received_bytes: received.received_bytes + more, ..received }, contents)
}

#[test]
fn c28_b26_a_tied_head_equals_the_embedding_or_is_refused() {
    let shape = tiny(true, DType::F32);
    let sent = complete(&shape, &mut Rng(1));
    let mut head = sent[0].clone();
    head.spec.name = HEAD.into();
    let mut different = head.clone();
    different.data[587] ^= 1;
    let finish = |tensors: &[&Sent], cut: usize| {
        let mut memory = arena(&shape);
        let mut intake = Intake::complete(shape.clone(), LoadOptions::default());
        for tensor in tensors {
            let (front, back) = tensor.data.split_at(cut.min(tensor.data.len()));
            for (offset, piece) in [(front.len(), back), (0, front)] {
                if !piece.is_empty() {
                    intake.push_piece(&mut memory, &tensor.spec, offset, piece).unwrap();
                }
            }
        }
        intake.finish()
    };
    let all: Vec<&Sent> = sent.iter().collect();
    for cut in [0, 1, 100, 587] {
        for order in 0..2 {
            let with = |head| {
                let mut tensors = all.clone();
                tensors.insert(if order == 0 { 0 } else { tensors.len() }, head);
                tensors
            };
            assert_eq!(finish(&with(&head), cut).unwrap().digest, digest(&sent));
            let error = finish(&with(&different), cut).unwrap_err();
            assert!(matches!(error, FinishError::Transfer(TransferError::TiedHeadDiffers)), "{error:?}");
        }
    }
    assert_eq!(finish(&all, 0).unwrap().digest, digest(&sent));
    // The head alone is no embedding.
    let mut head_only = all[1..].to_vec();
    head_only.push(&head);
    let FinishError::Mismatch(faults) = finish(&head_only, 0).unwrap_err() else { panic!() };
    assert_eq!((faults.missing.as_slice(), faults.num_faults()), (&[EMBEDDING.to_owned()][..], 1));
    // A part of it is incomplete.
    let mut memory = arena(&shape);
    let mut intake = Intake::complete(shape.clone(), LoadOptions::default());
    intake.push_all(&mut memory, &mut source(&sent), true).unwrap();
    intake.push_piece(&mut memory, &head.spec, 4, &head.data[4..8]).unwrap();
    let Err(FinishError::Mismatch(faults)) = intake.finish() else { panic!("a part of the head") };
    assert_eq!((faults.incomplete[0].name.as_str(), faults.incomplete[0].received_bytes), (HEAD, 4));
}

/// The tensor that is at fault is the one that was sent.
#[test]
fn c28_a_tied_head_with_a_nan_is_called_by_its_own_name() {
    let shape = tiny(true, DType::F32);
    let mut head = complete(&shape, &mut Rng(1)).remove(0);
    head.data[28 * 2 + 8..][..4].copy_from_slice(&f32::NAN.to_le_bytes());
    for name in [HEAD, EMBEDDING] {
        head.spec.name = name.into();
        let mut intake = Intake::complete(shape.clone(), LoadOptions::default().require_finite());
        let error = intake.push(&mut arena(&shape), name, &&head).unwrap_err();
        let PushError::Transfer(TransferError::NonFinite { tensor, index, .. }) = error else {
            panic!("{error}")
        };
        assert_eq!((tensor.as_str(), index), (name, vec![2, 2]));
    }
}

#[test]
fn c28_a_partial_update_may_bring_the_head_with_its_embedding_only() {
    let shape = tiny(true, DType::F32);
    let sent = complete(&shape, &mut Rng(1));
    let (before, _) = at_once(&shape, &LoadOptions::default(), &sent);
    let mut head = complete(&shape, &mut Rng(2)).remove(0);
    let embedding = head.clone();
    head.spec.name = HEAD.into();
    let begin = |name: &str| {
        let mut wanted = vec![false; sent.len()];
        wanted[shape.manifest.position(name).unwrap()] = true;
        Intake::partial(shape.clone(), LoadOptions::default(), wanted, before.digests.clone())
    };
    let mut memory = arena(&shape);
    let mut intake = begin(EMBEDDING);
    intake.push_all(&mut memory, &mut source([&head, &embedding]), true).unwrap();
    let received = intake.finish().unwrap();
    let mut mixed = sent.clone();
    mixed[0] = embedding.clone();
    assert_eq!((received.digest, received.tensors), (digest(&mixed), 1));
    let mut intake = begin(NORM);
    let PushError::Mismatch(faults) = intake.push(&mut memory, HEAD, &&head).unwrap_err() else { panic!() };
    assert_eq!(faults.not_asked, [HEAD]);
    let error = begin(NORM).push_resident(&mut memory, 0, 0, &embedding.data).unwrap_err();
    let PushError::Mismatch(faults) = error else { panic!("{error}") };
    assert_eq!(faults.not_asked, [EMBEDDING]);
    let error = begin(NORM).push_all(&mut memory, &mut source(&sent), true).unwrap_err();
    let PushError::Mismatch(faults) = error else { panic!("{error}") };
    assert_eq!(faults.not_asked.len(), sent.len() - 1);
    let Err(FinishError::Mismatch(faults)) = begin(NORM).finish() else { panic!("nothing arrived") };
    assert_eq!((faults.missing.as_slice(), faults.num_faults()), (&[NORM.to_owned()][..], 1));
}

#[test]
fn b48_another_digest_than_expected_is_refused() {
    let (_, _, sent) = begun(LoadOptions::default());
    let right = digest(&sent);
    let wrong = WeightsDigest::from_bytes([7; 32]);
    for expected in [right, wrong] {
        let (mut intake, mut memory, _) = begun(LoadOptions::default().expect_digest(expected));
        intake.push_all(&mut memory, &mut source(&sent), true).unwrap();
        match intake.finish() {
            Ok(received) => assert_eq!((received.digest, expected), (right, right)),
            Err(FinishError::Transfer(TransferError::WrongDigest { expected, received })) => {
                assert_eq!((expected, received), (wrong, right));
            }
            Err(error) => panic!("{error:?}"),
        }
    }
}

#[test]
fn buffers_and_what_the_map_ignores_are_dropped_in_pieces_too() {
    let names = NameMap::default().ignore_under("vision_tower");
    let (mut intake, mut memory, sent) = begun(LoadOptions::default().names(names));
    for name in ["model.layers.0.self_attn.rotary_emb.inv_freq", "vision_tower.proj.weight"] {
        let spec = TensorSpec { name: name.into(), dtype: DType::F32, shape: vec![4] };
        for _ in 0..2 {
            intake.push_piece(&mut memory, &spec, 0, &[0; 16]).unwrap();
        }
    }
    intake.push_all(&mut memory, &mut source(&sent), true).unwrap();
    let received = intake.finish().unwrap();
    assert_eq!(received.digest, digest(&sent));
    assert_eq!(received.received_bytes, sent.iter().map(|s| s.data.len() as u64).sum::<u64>());
}

/// Tensors of several windows, worked on by several threads.
#[test]
fn c29_large_tensors_are_cut_into_windows_without_a_seam() {
    let shape = shape_of(&config(false, 3001, 257), |_| DType::Bf16);
    let mut rng = Rng(9);
    let mut sent = complete(&shape, &mut rng);
    for tensor in &mut sent {
        tensor.data = rng.elements(DType::F32, tensor.spec.shape.iter().product());
        tensor.spec.dtype = DType::F32;
    }
    let options = LoadOptions::default().convert_dtypes().require_finite();
    let expected = expected(&shape, &sent, &NameMap::default());
    let (reference, reference_contents) = at_once(&shape, &options, &sent);
    assert_eq!(reference.digest, digest(&expected));
    for piece_bytes in [1 << 16, (1 << 21) + 1, 999_983] {
        let mut memory = arena(&shape);
        let mut intake = Intake::complete(shape.clone(), options.clone());
        for tensor in &sent {
            for (i, piece) in tensor.data.chunks(piece_bytes).enumerate() {
                intake.push_piece(&mut memory, &tensor.spec, i * piece_bytes, piece).unwrap();
            }
        }
        assert_eq!(intake.finish().unwrap(), reference);
        assert!(contents(&shape, &memory) == reference_contents, "pieces of {piece_bytes}");
        assert!(read_back(&shape, &memory) == expected);
    }
    // The first of several, far in.
    // Of one part, of two parts of a window, of two windows, and of the rows that fill no panel.
    let pairs =
        [(16_383, 16_384), (100, 400_000), (524_287, 700_001), (700_001, 771_256), (771_256, 771_256)];
    for (first, others) in pairs {
        let mut bad = sent[0].clone();
        for element in [first, others] {
            bad.data[element * 4..][..4].copy_from_slice(&f32::NAN.to_le_bytes());
        }
        let mut intake = Intake::complete(shape.clone(), options.clone());
        let (_, index, _) = non_finite(intake.push(&mut NoMemory, EMBEDDING, &&bad).unwrap_err());
        assert_eq!(index, [first / 257, first % 257]);
    }
}
