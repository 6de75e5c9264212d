//! Buckets that are right, every way to be wrong, and random bytes.

use std::collections::HashMap;
use std::time::{Duration, Instant};

use proptest::prelude::*;

use super::*;
use crate::weights::testing::{edit, file, load};
use crate::weights::{DType, SafetensorsBytes, SourceError, UnsupportedTensor, WeightSource};

/// A bucket by hand, whatever the table says.
fn raw(table: &str, data: &[u8]) -> Vec<u8> {
    raw_bytes(table.as_bytes(), data)
}

fn raw_bytes(table: &[u8], data: &[u8]) -> Vec<u8> {
    let (table_bytes, data_bytes) = (table.len() as u32, data.len() as u64);
    [
        b"DORMOUSE",
        &1_u32.to_le_bytes()[..],
        &table_bytes.to_le_bytes(),
        &data_bytes.to_le_bytes(),
        table,
        data,
    ]
    .concat()
}

fn piece(name: &str, dtype: &str, shape: &str, offset: usize, begin: usize, end: usize) -> String {
    format!(
        r#"{{"name":"{name}","dtype":"{dtype}","shape":{shape},"offset":{offset},"range":[{begin},{end}]}}"#
    )
}

fn table(pieces: &[String]) -> String {
    format!(r#"{{"tensors":[{}]}}"#, pieces.join(","))
}

fn fault_of(bytes: &[u8]) -> BucketError {
    match Bucket::parse(bytes) {
        Err(fault) => fault,
        Ok(bucket) => panic!("{bucket:?} of {}", String::from_utf8_lossy(bytes)),
    }
}

/// The fault of encoded pieces, which `Bucket::new` must find as well.
fn fault_of_pieces(pieces: &[String], data_bytes: usize) -> BucketError {
    let fault = fault_of(&raw(&table(pieces), &vec![7; data_bytes]));
    let entries = pieces.iter().map(|piece| entry_of(piece)).collect();
    assert_eq!(Bucket::new(entries, &vec![7; data_bytes]).unwrap_err(), fault);
    fault
}

/// What a piece says, read by other means.
fn entry_of(piece: &str) -> BucketEntry {
    let value: serde_json::Value = serde_json::from_str(piece).unwrap();
    let number = |value: &serde_json::Value| value.as_u64().unwrap() as usize;
    let dtype = match value["dtype"].as_str().unwrap() {
        "F32" => DType::F32,
        "F16" => DType::F16,
        "BF16" => DType::Bf16,
        other => panic!("{other}"),
    };
    let shape = value["shape"].as_array().unwrap().iter().map(number).collect();
    let tensor = TensorSpec { name: value["name"].as_str().unwrap().into(), dtype, shape };
    let range = number(&value["range"][0])..number(&value["range"][1]);
    BucketEntry { tensor, offset: number(&value["offset"]), range }
}

fn sample() -> (String, &'static [u8]) {
    let pieces = [
        piece("late", "F32", "[2,2]", 8, 6, 14),
        piece("b.bias", "BF16", "[3]", 0, 0, 6),
        piece("late", "F32", "[2,2]", 0, 14, 18),
        piece("scalar", "F16", "[]", 0, 18, 20),
    ];
    (table(&pieces), b"uvwxyzefghijklabcd01")
}

/// What a bucket promises, checked byte by byte.
fn assert_invariants(bucket: &Bucket<'_>) {
    let mut owned = vec![false; bucket.data().len()];
    let mut sent: HashMap<&str, (&TensorSpec, HashMap<usize, ()>)> = HashMap::new();
    assert!(bucket.entries().len() <= MAX_ENTRIES);
    assert_eq!(bucket.pieces().count(), bucket.entries().len());
    for ((entry, bytes), listed) in bucket.pieces().zip(bucket.entries()) {
        assert_eq!(entry, listed);
        assert!(!bytes.is_empty() && bytes == &bucket.data()[entry.range.clone()]);
        let element = if entry.tensor.dtype == DType::F32 { 4 } else { 2 };
        assert!(entry.offset % element == 0 && bytes.len() % element == 0, "{entry:?}");
        assert!(entry.tensor.name.len() <= 4096 && entry.tensor.shape.len() <= 8);
        let whole = entry.tensor.shape.iter().fold(element as u128, |bytes, &n| bytes * n as u128);
        assert!(entry.offset as u128 + bytes.len() as u128 <= whole, "{entry:?}");
        for owned in &mut owned[entry.range.clone()] {
            assert!(!std::mem::replace(owned, true), "{entry:?}");
        }
        let (spec, seen) = sent.entry(&entry.tensor.name).or_insert((&entry.tensor, HashMap::new()));
        assert_eq!(*spec, &entry.tensor);
        for byte in entry.offset..entry.offset + bytes.len() {
            assert!(seen.insert(byte, ()).is_none(), "{entry:?}");
        }
    }
    assert!(owned.into_iter().all(|owned| owned));
}

/// A source that hands out pieces of some length, and may lie or fail.
#[derive(Debug, Clone, Default)]
struct Tensors {
    tensors: Vec<(TensorSpec, Vec<u8>)>,
    piece_bytes: usize,
    changes: bool,
    unsupported: Vec<UnsupportedTensor>,
    calls: Vec<String>,
}

impl Tensors {
    fn new(tensors: &[(&str, DType, &[usize], &[u8])]) -> Self {
        let tensors = tensors.iter().map(|&(name, dtype, shape, data)| {
            (TensorSpec { name: name.into(), dtype, shape: shape.into() }, data.to_vec())
        });
        Self { tensors: tensors.collect(), piece_bytes: 3, ..Self::default() }
    }
}

impl WeightSource for Tensors {
    fn index(&mut self) -> Result<Vec<TensorSpec>, SourceError> {
        self.calls.push("index".into());
        Ok(self.tensors.iter().map(|(spec, _)| spec.clone()).collect())
    }

    fn unsupported(&self) -> &[UnsupportedTensor] {
        &self.unsupported
    }

    fn plan(&mut self, tensors: &[usize]) -> Result<(), SourceError> {
        self.calls.push(format!("plan {tensors:?}"));
        Ok(())
    }

    fn read(&mut self, tensor: usize, sink: &mut dyn FnMut(&[u8])) -> Result<(), SourceError> {
        self.calls.push(format!("read {tensor}"));
        self.tensors[tensor].1.chunks(self.piece_bytes).for_each(|piece| {
            sink(piece);
            sink(&[]);
        });
        Ok(())
    }

    fn finish(&mut self) -> Result<(), SourceError> {
        self.calls.push("finish".into());
        if self.changes { Err(SourceError::ChangedDuringRead { path: "x".into() }) } else { Ok(()) }
    }
}

/// What was handed out, and how it ended.
fn write(source: &mut dyn WeightSource, capacity_bytes: usize) -> (Vec<Vec<u8>>, Result<(), SourceError>) {
    let mut buckets = Vec::new();
    let result = BucketWriter::new(capacity_bytes).write(source, &mut |bucket| {
        buckets.push(bucket);
        Ok(())
    });
    (buckets, result)
}

fn refused(source: &mut Tensors, capacity_bytes: usize) -> BucketError {
    let (buckets, result) = write(source, capacity_bytes);
    assert!(buckets.is_empty());
    assert_eq!(source.calls, ["index"], "found before anything is read");
    match result {
        Err(SourceError::Bucket { fault }) => *fault,
        other => panic!("{other:?}"),
    }
}

#[test]
fn reads_what_was_written_by_hand() {
    let (table, data) = sample();
    let bytes = raw(&table, data);
    // At any address.
    for padding in 0..8 {
        let shifted = [&vec![0; padding], &bytes[..]].concat();
        let bucket = Bucket::parse(&shifted[padding..]).unwrap();
        assert_invariants(&bucket);
        let pieces: Vec<_> =
            bucket.pieces().map(|(entry, data)| (&entry.tensor.name[..], entry.offset, data)).collect();
        assert_eq!(
            pieces,
            [
                ("late", 8, &b"efghijkl"[..]),
                ("b.bias", 0, b"uvwxyz"),
                ("late", 0, b"abcd"),
                ("scalar", 0, b"01")
            ]
        );
        let inside = shifted[padding..].as_ptr_range();
        assert!(bucket.pieces().all(|(_, data)| inside.contains(&data.as_ptr())), "no copy");
        assert_eq!(Bucket::new(bucket.entries().to_vec(), bucket.data()).unwrap(), bucket);
        assert_eq!(format!("{bucket:?}"), "Bucket { entries: 4, data_bytes: 20 }");
    }
    let bytes = raw("{ \"tensors\" : [ ]\n}", b"");
    let empty = Bucket::parse(&bytes).unwrap();
    assert!(empty.entries().is_empty() && empty.data().is_empty());
    let no_offset = r#"{"tensors":[{"range":[0,2],"shape":[1],"dtype":"F16","name":"\u0061"}]}"#;
    assert_eq!(Bucket::parse(&raw(no_offset, b"xy")).unwrap().entries()[0].tensor.name, "a");
}

/// Written by the Python in the docs.
#[test]
fn reads_what_python_wrote() {
    let bytes = [
        &b"DORMOUSE\x01\0\0\0\xb3\0\0\0\n\0\0\0\0\0\0\0{\"tensors\": ["[..],
        br#"{"name": "a.weight", "dtype": "BF16", "shape": [2, 2], "offset": 2, "range": [0, 6]}, "#,
        br#"{"name": "\u00e9", "dtype": "F32", "shape": [], "offset": 0, "range": [6, 10]}]}"#,
        b"uvwxyz1234",
    ]
    .concat();
    let bucket = Bucket::parse(&bytes).unwrap();
    assert_invariants(&bucket);
    let [first, second] = bucket.entries() else { panic!("{:?}", bucket.entries()) };
    assert_eq!(
        (&first.tensor.name[..], first.tensor.dtype, &first.tensor.shape[..]),
        ("a.weight", DType::Bf16, &[2, 2][..])
    );
    assert_eq!((&second.tensor.name[..], second.tensor.dtype), ("\u{e9}", DType::F32));
    let data: Vec<_> = bucket.pieces().map(|(entry, data)| (entry.offset, data)).collect();
    assert_eq!(data, [(2, &b"uvwxyz"[..]), (0, b"1234")]);
}

#[test]
fn writes_full_buckets_and_cuts_tensors_between_elements() {
    let mut source = Tensors::new(&[
        ("a", DType::F16, &[5], b"0123456789"),
        ("empty", DType::F32, &[3, 0], b""),
        ("b \" \u{e9} \\", DType::F32, &[2, 1], b"abcdefgh"),
    ]);
    source.unsupported.push(UnsupportedTensor { name: "ids".into(), dtype: "I64".into() });
    let (buckets, result) = write(&mut source, 7);
    result.unwrap();
    assert_eq!(source.calls, ["index", "plan [0, 2]", "read 0", "read 2", "finish"]);
    let pieces: Vec<Vec<_>> = buckets
        .iter()
        .map(|bytes| {
            let bucket = Bucket::parse(bytes).unwrap();
            assert_eq!(bytes.capacity(), bytes.len());
            bucket
                .pieces()
                .map(|(entry, data)| (entry.tensor.name.chars().next().unwrap(), entry.offset, data))
                .collect()
        })
        .collect();
    let expected: [&[_]; 4] = [
        &[('a', 0, &b"012345"[..])],
        // Three bytes are left, too few for an f32.
        &[('a', 6, b"6789")],
        &[('b', 0, b"abcd")],
        &[('b', 4, b"efgh")],
    ];
    assert_eq!(pieces, expected);
    assert_eq!(Bucket::parse(&buckets[3]).unwrap().entries()[0].tensor.name, "b \" \u{e9} \\");
    let (buckets, result) = write(&mut source, usize::MAX);
    assert!(result.is_ok() && buckets.len() == 1);
    assert_eq!(Bucket::parse(&buckets[0]).unwrap().data(), b"0123456789abcdefgh");
    let (buckets, result) = write(&mut Tensors::new(&[]), 0);
    assert!(result.is_ok() && buckets.is_empty());
}

#[test]
fn writes_what_a_safetensors_file_holds() {
    let bytes = file(&[("x", "F32", &[2], b"abcdefgh"), ("ids", "I64", &[1], b"12345678")]);
    let (buckets, result) = write(&mut SafetensorsBytes::new(&bytes), 1 << 20);
    result.unwrap();
    assert_eq!(Bucket::parse(&buckets[0]).unwrap().data(), b"abcdefgh");
}

#[test]
fn a_bucket_is_closed_when_its_table_is_full() {
    let names: Vec<String> = (0..=MAX_ENTRIES).map(|i| i.to_string()).collect();
    let tensors: Vec<_> = names.iter().map(|name| (&name[..], DType::F16, &[][..], &b"xy"[..])).collect();
    let (buckets, result) = write(&mut Tensors::new(&tensors), 1 << 20);
    result.unwrap();
    let entries: Vec<_> = buckets.iter().map(|b| Bucket::parse(b).unwrap().entries().len()).collect();
    assert_eq!(entries, [MAX_ENTRIES, 1]);
    // Each of these bytes needs six in JSON.
    let names: Vec<String> = (0..2800).map(|i| format!("{i:04096}").replace('0', "\u{1}")).collect();
    let tensors: Vec<_> = names.iter().map(|name| (&name[..], DType::F16, &[][..], &b"xy"[..])).collect();
    let (buckets, result) = write(&mut Tensors::new(&tensors), 1 << 20);
    result.unwrap();
    let entries: Vec<_> = buckets.iter().map(|b| Bucket::parse(b).unwrap().entries().len()).collect();
    assert!(entries.len() == 2 && entries.iter().sum::<usize>() == 2800, "{entries:?}");
}

#[test]
fn b37_what_no_bucket_can_hold_is_refused_before_anything_is_read() {
    const FOUR: &[u8] = b"abcd";
    let one = |name: &str, shape: &[usize]| Tensors::new(&[(name, DType::F32, shape, FOUR)]);
    for capacity_bytes in 0..4 {
        let fault = refused(&mut one("t", &[1]), capacity_bytes);
        assert_eq!(
            fault,
            BucketError::CapacityTooSmall { tensor: "t".into(), dtype: DType::F32, capacity_bytes }
        );
    }
    let long = "n".repeat(4097);
    assert!(matches!(refused(&mut one(&long, &[1]), 9), BucketError::NameTooLong { bytes: 4097, .. }));
    assert!(matches!(
        refused(&mut one("t", &[1; 9]), 9),
        BucketError::TooManyDimensions { dimensions: 9, limit: 8, .. }
    ));
    assert!(matches!(refused(&mut one("t", &[usize::MAX, 2]), 9), BucketError::SizeOverflow { .. }));
    // A source that can't mean what it says.
    let (buckets, result) = write(&mut one("t", &[1 << 60]), usize::MAX);
    assert!(matches!(
        result,
        Err(SourceError::Bucket { fault }) if matches!(*fault, BucketError::OutOfMemory { .. })
    ));
    assert!(buckets.is_empty());
}

#[test]
fn b42_a_source_that_lists_a_tensor_twice_is_refused() {
    let twice = |shape: &[usize]| {
        let tensors = [("t", DType::F16, &[2][..], &b"abcd"[..]), ("t", DType::F16, shape, b"abcd")];
        refused(&mut Tensors::new(&tensors), 2)
    };
    assert_eq!(twice(&[2]), BucketError::Duplicate { tensor: "t".into(), begin: 0, end: 4 });
    assert!(matches!(twice(&[2, 1]), BucketError::Conflict { .. }));
}

#[test]
fn b37_a_source_that_delivers_another_length_ends_the_write() {
    for (delivered, piece_bytes) in [(0, 3), (4, 3), (12, 3), (12, 100), (9, 1), (7, 1)] {
        let mut source = Tensors::new(&[
            ("first", DType::F32, &[1], b"1234"),
            ("t", DType::F32, &[2], &b"abcdefghijkl"[..delivered]),
        ]);
        source.piece_bytes = piece_bytes;
        let (buckets, result) = write(&mut source, 4);
        let Err(SourceError::WrongLength { tensor, expected_bytes, received_bytes, .. }) = result else {
            panic!("{result:?}")
        };
        assert_eq!((&tensor[..], expected_bytes, received_bytes), ("t", Some(8), delivered));
        assert!(buckets.iter().all(|bucket| Bucket::parse(bucket).is_ok()));
        assert!(buckets.len() < 3, "never the whole model");
    }
}

#[test]
fn c27_the_last_bucket_waits_for_the_source_to_finish() {
    let mut source = Tensors::new(&[("t", DType::F32, &[2], b"abcdefgh")]);
    source.changes = true;
    let (buckets, result) = write(&mut source, 4);
    assert!(matches!(result, Err(SourceError::ChangedDuringRead { .. })) && buckets.len() == 1);
    // A receiver that fails is asked for nothing more.
    for fails_at in 0..3 {
        let mut source = Tensors::new(&[("t", DType::F16, &[3], b"abcdef")]);
        let mut calls = 0;
        let result = BucketWriter::new(2).write(&mut source, &mut |_| {
            calls += 1;
            if calls > fails_at { Err(SourceError::Custom("refused".into())) } else { Ok(()) }
        });
        assert_eq!((result.unwrap_err().to_string(), calls), ("refused".to_owned(), fails_at + 1));
    }
}

#[test]
fn b35_pickles_archives_and_other_files_are_refused_by_name() {
    for protocol in 2..=5 {
        let pickle = [b"\x80", &[protocol][..], b"\x95\x0b\0\0\0\0\0\0\0\x8c\x07payload\x94."].concat();
        for length in 2..pickle.len() {
            assert_eq!(fault_of(&pickle[..length]), BucketError::Pickle);
        }
    }
    assert!(BucketError::Pickle.to_string().contains("this looks like a pickle; pickles are never read"));
    assert_eq!(fault_of(b"PK\x03\x04\0\0\x08\x08\0\0\0\0archive/data.pkl"), BucketError::ZipFile);
    assert_eq!(fault_of(&file(&[("x", "F16", &[1], b"ab")])), BucketError::SafetensorsFile);
    for other in [
        &b"{\"tensors\":[]}"[..],
        b"[]",
        b"\0",
        b"D0RMOUSE",
        b"dormouse\x01\0\0\0",
        b"\x1f\x8b\x08",
        b"GGUF\x03\0\0\0",
        b"\xff\xfe\xfd\xfc",
        b"\x93NUMPY\x01\0v\0{'descr'",
        &[0; 100],
    ] {
        let fault = fault_of(other);
        assert!(matches!(fault, BucketError::WrongMagic { .. }), "{fault}");
    }
    assert_eq!(
        fault_of(b"\x00{\"abcdefg").to_string(),
        r#"not a bucket: begins with "\x00{\"abcde", expected "DORMOUSE""#
    );
}

#[test]
fn b40_a_bucket_cut_anywhere_is_truncated() {
    let (table, data) = sample();
    let bytes = raw(&table, data);
    for length in 0..bytes.len() {
        let fault = fault_of(&bytes[..length]);
        let BucketError::Truncated { expected_bytes, actual_bytes } = fault else { panic!("{fault}") };
        assert_eq!(actual_bytes, length as u64);
        assert_eq!(expected_bytes, if length < 24 { 24 } else { bytes.len() as u64 });
    }
    let longer = [&bytes[..], b"!"].concat();
    let (expected_bytes, actual_bytes) = (bytes.len() as u64, longer.len() as u64);
    assert_eq!(fault_of(&longer), BucketError::TrailingBytes { expected_bytes, actual_bytes });
    for version in [0_u32, 2, 1 << 24, u32::MAX] {
        let mut other = bytes.clone();
        other[8..12].copy_from_slice(&version.to_le_bytes());
        assert_eq!(fault_of(&other), BucketError::UnknownVersion { version, supported: 1 });
    }
}

#[test]
fn b38_lengths_are_checked_before_anything_is_allocated() {
    let with_lengths = |table: u32, data: u64, rest: &[u8]| {
        [b"DORMOUSE\x01\0\0\0", &table.to_le_bytes()[..], &data.to_le_bytes(), rest].concat()
    };
    for bytes in [u32::MAX, (64 << 20) + 1] {
        let fault = fault_of(&with_lengths(bytes, 0, b"{}"));
        assert_eq!(fault, BucketError::TableTooLong { bytes: bytes.into(), limit_bytes: 64 << 20 });
    }
    for (table, data) in [(64 << 20, 0), (14, 0), (2, u64::MAX), (0, u64::MAX - 20), (13, u64::MAX - 37)] {
        let fault = fault_of(&with_lengths(table, data, b"{\"tensors\":"));
        assert!(matches!(fault, BucketError::Truncated { actual_bytes: 35, .. }), "{fault}");
    }
    let fault = fault_of(&with_lengths(2, u64::MAX, b"{}"));
    assert_eq!(fault, BucketError::Truncated { expected_bytes: u64::MAX, actual_bytes: 26 });
    // The table may not take from the data, nor the data from the table.
    assert!(matches!(fault_of(&with_lengths(1, 0, b"{}")), BucketError::TrailingBytes { .. }));
    assert!(matches!(fault_of(&with_lengths(1, 1, b"{}")), BucketError::Table { .. }));
}

#[test]
fn b38_a_million_entries_or_a_name_of_a_megabyte_end_early() {
    let begin = Instant::now();
    let one = piece("t", "F16", "[1]", 0, 0, 2);
    let million = format!(r#"{{"tensors":[{}"#, format!("{one},").repeat(1_000_000));
    let fault = fault_of(&raw(&million, b"xy"));
    // It doesn't come to what the table lacks, nor to its many overlaps.
    assert_eq!(fault, BucketError::TooManyEntries { limit: 65_536 });
    for (name, bytes) in
        [("n".repeat(4097), 4097), ("n".repeat(1 << 20), 1 << 20), ("\\n".repeat(9999), 9999)]
    {
        let fault = fault_of(&raw(&table(&[piece(&name, "F16", "[1]", 0, 0, 2)]), b"xy"));
        assert!(fault.to_string().len() < 1000);
        assert!(
            matches!(fault, BucketError::NameTooLong { bytes: b, limit_bytes: 4096, .. } if b == bytes),
            "{fault}"
        );
    }
    let longest = raw(&table(&[piece(&"n".repeat(4096), "F16", "[1]", 0, 0, 2)]), b"xy");
    assert_eq!(Bucket::parse(&longest).unwrap().entries()[0].tensor.name.len(), 4096);
    for long in [
        piece("t", &"F".repeat(1 << 20), "[1]", 0, 0, 2),
        piece("t", "F16", &format!("[{}1]", "1,".repeat(1 << 20)), 0, 0, 2),
        format!(r#"{{"{}":0}}"#, "k".repeat(1 << 20)),
        "[".repeat(1 << 20),
        r#"{"name":"#.repeat(1 << 20),
        format!(r#"{{"shape":{}"#, "[".repeat(1 << 20)),
        format!(r#"{{"offset":{}}}"#, "9".repeat(1 << 20)),
    ] {
        let fault = fault_of(&raw(&table(&[long]), b"xy")).to_string();
        assert!(fault.len() < 1000, "{fault}");
    }
    assert!(begin.elapsed() < Duration::from_secs(20), "{:?}", begin.elapsed());
}

#[test]
fn b38_as_many_entries_as_allowed_are_read() {
    let pieces: Vec<_> =
        (0..MAX_ENTRIES).map(|i| piece("t", "F16", "[65536]", 2 * i, 2 * i, 2 * i + 2)).collect();
    let data = vec![1; 2 * MAX_ENTRIES];
    let bytes = raw(&table(&pieces), &data);
    let mut entries = Bucket::parse(&bytes).unwrap().entries().to_vec();
    entries.reverse();
    assert_eq!(Bucket::new(entries.clone(), &data).unwrap().entries().len(), MAX_ENTRIES);
    entries.push(entries[0].clone());
    let fault = Bucket::new(entries, &data).unwrap_err();
    assert_eq!(fault, BucketError::TooManyEntries { limit: MAX_ENTRIES });
}

#[test]
fn b35_tables_of_another_form_are_errors_with_line_and_column() {
    let entry = |text: &str| format!("{{\"tensors\":[\n{text}]}}");
    for table in [
        "".to_owned(),
        "null".into(),
        "[]".into(),
        "{".into(),
        "{}".into(),
        r#"{"tensors":[]} x"#.into(),
        r#"{"tensors":{}}"#.into(),
        r#"{"tensors":null}"#.into(),
        r#"{"tensors":[],"tensors":[]}"#.into(),
        r#"{"tensors":[],"version":1}"#.into(),
        r#"{"Tensors":[]}"#.into(),
        r#"[[]]"#.into(),
        entry("null"),
        entry("{}"),
        entry(r#"["t","F16",[1],0,[0,2]]"#),
        entry(r#"{"name":"t","dtype":"F16","shape":[1]}"#),
        entry(r#"{"name":"t","dtype":"F16","range":[0,2]}"#),
        entry(r#"{"name":"t","shape":[1],"range":[0,2]}"#),
        entry(r#"{"dtype":"F16","shape":[1],"range":[0,2]}"#),
        entry(r#"{"name":"t","dtype":"F16","shape":[1],"range":[0,2],"more":0}"#),
        entry(r#"{"name":"t","name":"t","dtype":"F16","shape":[1],"range":[0,2]}"#),
        entry(r#"{"name":"t","dtype":"F16","dtype":"F16","shape":[1],"range":[0,2]}"#),
        entry(r#"{"name":"t","dtype":"F16","shape":[1],"shape":[1],"range":[0,2]}"#),
        entry(r#"{"name":"t","dtype":"F16","shape":[1],"range":[0,2],"range":[0,2]}"#),
        entry(r#"{"name":"t","dtype":"F16","shape":[1],"offset":0,"offset":0,"range":[0,2]}"#),
        entry(r#"{"name":"t","dtype":"F16","shape":[1],"offset":null,"range":[0,2]}"#),
        entry(r#"{"name":"t","dtype":"F16","shape":[1],"offset":-2,"range":[0,2]}"#),
        entry(r#"{"name":"t","dtype":"F16","shape":[1],"offset":0.0,"range":[0,2]}"#),
        entry(r#"{"name":"t","dtype":"F16","shape":[1],"range":[0]}"#),
        entry(r#"{"name":"t","dtype":"F16","shape":[1],"range":[0,2,4]}"#),
        entry(r#"{"name":"t","dtype":"F16","shape":[1],"range":[0,18446744073709551616]}"#),
        entry(r#"{"name":"t","dtype":"F16","shape":1,"range":[0,2]}"#),
        entry(r#"{"name":"t","dtype":"F16","shape":["1"],"range":[0,2]}"#),
        entry(r#"{"name":"t","dtype":"F16","shape":[1e0],"range":[0,2]}"#),
        entry(r#"{"name":1,"dtype":"F16","shape":[1],"range":[0,2]}"#),
        entry(r#"{"name":"t","dtype":1,"shape":[1],"range":[0,2]}"#),
        entry(r#"{"name":"\ud800","dtype":"F16","shape":[1],"range":[0,2]}"#),
        entry(r#"{"name":"t","dtype":"F16","shape":[1],"range":[0,2]},"#),
    ] {
        let fault = fault_of(&raw(&table, b"xy"));
        let BucketError::Table { line, reason, .. } = &fault else { panic!("{table}: {fault}") };
        assert!(*line <= 2 && !reason.contains(" at line "), "{table}: {fault}");
    }
    let fault = fault_of(&raw(&entry(r#"{"name":"t","nome":1}"#), b""));
    let BucketError::Table { line: 2, column: 18..=20, reason } = fault else { panic!("{fault}") };
    assert!(reason.contains("unknown field `nome`"), "{reason}");
    assert_eq!(fault_of(&raw_bytes(b"{\"\xff\"", b"")), BucketError::TableNotUtf8 { valid_bytes: 2 });
    assert_eq!(fault_of(&raw_bytes(b"\xef\xbb", b"")), BucketError::TableNotUtf8 { valid_bytes: 0 });
    assert!(matches!(fault_of(&raw("\u{feff}{\"tensors\":[]}", b"")), BucketError::Table { .. }));
}

#[test]
fn b37_tensors_are_checked_whatever_the_range() {
    for dtype in ["I64", "F8_E4M3", "f32", "bfloat16", "", "F32 "] {
        let fault = fault_of(&raw(&table(&[piece("t", dtype, "[1]", 0, 0, 4)]), b"1234"));
        assert_eq!(fault, BucketError::UnknownDType { tensor: "t".into(), dtype: dtype.into() });
    }
    for shape in ["[18446744073709551615,2]", "[4294967296,4294967296]", "[4611686018427387904]"] {
        let fault = fault_of_pieces(&[piece("t", "F32", shape, 0, 0, 4)], 4);
        assert!(matches!(fault, BucketError::SizeOverflow { .. }), "{fault}");
    }
    let fault = fault_of(&raw(&table(&[piece("t", "F32", "[1,1,1,1,1,1,1,1,1]", 0, 0, 4)]), b"1234"));
    assert_eq!(fault, BucketError::TooManyDimensions { tensor: "t".into(), dimensions: 9, limit: 8 });
}

#[test]
fn b37_pieces_are_whole_elements_inside_tensor_and_data() {
    const MAX: usize = usize::MAX;
    let t = || "t".to_owned();
    let fault = |offset, begin, end| fault_of_pieces(&[piece("t", "F32", "[2]", offset, begin, end)], 8);
    assert_eq!(fault(0, 4, 0), BucketError::Inverted { tensor: t(), begin: 4, end: 0 });
    assert_eq!(fault(0, MAX, 0), BucketError::Inverted { tensor: t(), begin: MAX, end: 0 });
    for (begin, end) in [(0, 12), (0, MAX), (MAX, MAX), (9, 9)] {
        assert_eq!(fault(0, begin, end), BucketError::OutsideData { tensor: t(), begin, end, data_bytes: 8 });
    }
    for begin in [0, 4, 8] {
        assert_eq!(fault(0, begin, begin), BucketError::Empty { tensor: t(), begin });
    }
    for (offset, bytes) in [(0, 7), (0, 1), (2, 4), (1, 8), (MAX, 8), (MAX - 1, 4)] {
        let dtype = DType::F32;
        assert_eq!(fault(offset, 0, bytes), BucketError::Misaligned { tensor: t(), dtype, offset, bytes });
    }
    assert!(fault(2, 0, 4).to_string().contains("wrong alignment"));
    for (offset, bytes) in [(4, 8), (8, 4), (MAX - 3, 4), (MAX - 3, 8), (1 << 63, 8)] {
        let expected = BucketError::OutsideTensor { tensor: t(), offset, bytes, tensor_bytes: 8 };
        assert_eq!(fault(offset, 0, bytes), expected);
    }
    let empty = fault_of_pieces(&[piece("t", "F16", "[0]", 0, 0, 0)], 0);
    assert_eq!(empty, BucketError::Empty { tensor: t(), begin: 0 });
}

#[test]
fn b38_overlaps_and_gaps_are_distinct_errors() {
    let whole = |name: &str, begin: usize, end: usize| {
        piece(name, "F16", &format!("[{}]", (end - begin) / 2), 0, begin, end)
    };
    let overlap =
        |begin, other_end| BucketError::Overlap { tensor: "b".into(), begin, other: "a".into(), other_end };
    assert_eq!(fault_of_pieces(&[whole("a", 0, 8), whole("b", 4, 12)], 12), overlap(4, 8));
    assert_eq!(fault_of_pieces(&[whole("b", 7, 9), whole("a", 0, 8)], 9), overlap(7, 8));
    assert_eq!(fault_of_pieces(&[whole("a", 0, 8), whole("b", 2, 4)], 8), overlap(2, 8));
    let same = fault_of_pieces(&[whole("a", 0, 8), whole("b", 0, 8)], 8);
    assert!(matches!(same, BucketError::Overlap { begin: 0, other_end: 8, .. }));
    let gap = |begin, end| BucketError::Gap { begin, end };
    assert_eq!(fault_of_pieces(&[whole("b", 8, 12), whole("a", 0, 4)], 12), gap(4, 8));
    assert_eq!(fault_of_pieces(&[whole("a", 4, 8)], 8), gap(0, 4));
    assert_eq!(fault_of_pieces(&[whole("a", 0, 4)], 8), gap(4, 8));
    assert_eq!(fault_of_pieces(&[], 3), gap(0, 3));
}

#[test]
fn b42_bytes_of_a_tensor_that_occur_twice_are_named() {
    let part = |offset, begin, end| piece("t", "F16", "[8]", offset, begin, end);
    let twice = |begin, end| BucketError::Duplicate { tensor: "t".into(), begin, end };
    // The very same entry, the same bytes elsewhere, an overlap, one inside the other.
    assert_eq!(fault_of_pieces(&[part(0, 0, 4), part(0, 0, 4)], 4), twice(0, 4));
    assert_eq!(fault_of_pieces(&[part(0, 0, 4), part(0, 4, 8)], 8), twice(0, 4));
    assert_eq!(fault_of_pieces(&[part(6, 0, 4), part(4, 4, 8)], 8), twice(6, 8));
    assert_eq!(fault_of_pieces(&[part(0, 0, 8), part(2, 8, 10)], 10), twice(2, 4));
    // The same name in another spelling.
    let spelled = part(0, 4, 8).replace(r#""t""#, r#""\u0074""#);
    assert_eq!(fault_of_pieces(&[part(0, 0, 4), spelled], 8), twice(0, 4));
    let ok = raw(&table(&[part(4, 0, 4), part(0, 4, 8), part(12, 8, 12)]), b"abcdefghijkl");
    assert_invariants(&Bucket::parse(&ok).unwrap());
}

#[test]
fn b42_entries_of_one_name_must_agree() {
    let first = piece("t", "F16", "[4]", 0, 0, 4);
    for other in [piece("t", "BF16", "[4]", 4, 4, 8), piece("t", "F16", "[2,2]", 4, 4, 8)] {
        let fault = fault_of_pieces(&[first.clone(), other], 8);
        assert!(matches!(fault, BucketError::Conflict { .. }), "{fault}");
        assert!(fault.to_string().contains("`t` is f16 [4] and "), "{fault}");
    }
}

fn any_tensors() -> impl Strategy<Value = Vec<(DType, Vec<usize>)>> {
    let dtype = prop::sample::select(vec![DType::F32, DType::F16, DType::Bf16]);
    prop::collection::vec((dtype, prop::collection::vec(0_usize..5, 0..4)), 0..12)
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(512))]

    #[test]
    fn pieces_of_all_buckets_put_together_are_the_tensors(
        tensors in any_tensors(),
        spare_bytes in prop_oneof![0_usize..3, 0_usize..40, Just(1 << 20)],
        piece_bytes in 1_usize..50,
    ) {
        let element = tensors.iter().map(|(dtype, _)| dtype.size()).max().unwrap_or(0);
        let capacity_bytes = element + spare_bytes;
        let mut next = 0_u32;
        let tensors = tensors.into_iter().enumerate().map(|(i, (dtype, shape))| {
            let spec = TensorSpec { name: format!("t{i}"), dtype, shape };
            let bytes = (0..spec.checked_bytes().unwrap()).map(|_| {
                next += 1;
                next.wrapping_mul(2_654_435_761).to_be_bytes()[0]
            });
            let bytes = bytes.collect();
            (spec, bytes)
        }).collect();
        let mut source = Tensors { tensors, piece_bytes, ..Tensors::default() };
        let (buckets, result) = write(&mut source, capacity_bytes);
        result.unwrap();
        let mut together: HashMap<String, Vec<Option<u8>>> = source.tensors.iter()
            .map(|(spec, bytes)| (spec.name.clone(), vec![None; bytes.len()])).collect();
        for (i, bytes) in buckets.iter().enumerate() {
            let bucket = Bucket::parse(bytes).unwrap();
            assert_invariants(&bucket);
            let data_bytes = bucket.data().len();
            prop_assert!(data_bytes <= capacity_bytes && data_bytes > 0);
            let last = i + 1 == buckets.len();
            prop_assert!(last || data_bytes + element > capacity_bytes, "as full as can be");
            for (entry, bytes) in bucket.pieces() {
                let tensor = together.get_mut(&entry.tensor.name).unwrap();
                for (slot, byte) in tensor[entry.offset..].iter_mut().zip(bytes) {
                    prop_assert_eq!(slot.replace(*byte), None);
                }
            }
        }
        for (spec, bytes) in load(&mut source).unwrap() {
            let whole: Option<Vec<u8>> = together[&spec.name].iter().copied().collect();
            prop_assert_eq!(whole, Some(bytes));
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(4096))]

    #[test]
    fn edited_buckets_are_errors_or_keep_their_promises(
        edits in prop::collection::vec(any::<(u8, usize, u8)>(), 0..5),
    ) {
        let (table, data) = sample();
        let mut bytes = raw(&table, data);
        edits.into_iter().for_each(|change| edit(&mut bytes, change));
        if let Ok(bucket) = Bucket::parse(&bytes) {
            assert_invariants(&bucket);
        }
    }

    #[test]
    fn edited_tables_with_a_right_length_are_errors_or_keep_their_promises(
        edits in prop::collection::vec(any::<(u8, usize, u8)>(), 0..4),
    ) {
        let (table, data) = sample();
        let mut table = table.into_bytes();
        edits.into_iter().for_each(|change| edit(&mut table, change));
        if let Ok(bucket) = Bucket::parse(&raw_bytes(&table, data)) {
            assert_invariants(&bucket);
        }
    }

    /// Numbers that are nearly right: most of the tables get as far as the last checks.
    #[test]
    fn random_pieces_are_errors_or_keep_their_promises(
        pieces in prop::collection::vec(
            (0_usize..2, 0_usize..3, 0_usize..4, 1_usize..3, any::<bool>()),
            0..5,
        ),
    ) {
        let mut end = 0;
        let pieces: Vec<String> = pieces.into_iter().map(|(name, dtype, offset, length, follows)| {
            let begin = if follows { end } else { 2 * offset };
            end = begin + 2 * length;
            piece(["a", "b"][name], ["F16", "F16", "F32"][dtype], "[4]", 2 * offset, begin, end)
        }).collect();
        if let Ok(bucket) = Bucket::parse(&raw(&table(&pieces), &vec![0; end])) {
            assert_invariants(&bucket);
        }
    }

    #[test]
    fn b35_random_bytes_are_errors(
        magic in any::<bool>(),
        bytes in prop::collection::vec(any::<u8>(), 0..200),
    ) {
        let bytes = if magic { [&b"DORMOUSE\x01\0\0\0"[..], &bytes].concat() } else { bytes };
        prop_assert!(Bucket::parse(&bytes).is_err());
    }
}
