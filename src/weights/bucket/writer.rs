//! The trainer's side: a source of weights, cut into encoded buckets.

use super::{BucketError, MAX_ENTRIES, MAX_TABLE_BYTES, check, prefix, table};
use crate::weights::TensorSpec;
use crate::weights::json::cut;
use crate::weights::source::{SourceError, WeightSource};

/// Begin and end of a table.
const TABLE_FRAME: [&str; 2] = ["{\"tensors\":[", "]}"];

/// Writes weights as a sequence of encoded [`Bucket`](crate::Bucket)s.
///
/// ```
/// use dormouse::{Bucket, BucketWriter, DType, SourceError, TensorSpec, WeightSource};
///
/// # struct Policy;
/// # impl WeightSource for Policy {
/// #     fn index(&mut self) -> Result<Vec<TensorSpec>, SourceError> {
/// #         Ok(vec![TensorSpec { name: "a".into(), dtype: DType::F16, shape: vec![5] }])
/// #     }
/// #     fn read(&mut self, _: usize, sink: &mut dyn FnMut(&[u8])) -> Result<(), SourceError> {
/// #         Ok(sink(b"0123456789"))
/// #     }
/// # }
/// let mut sent = Vec::new();
/// BucketWriter::new(4).write(&mut Policy, &mut |bucket| {
///     sent.push(bucket); // over the network, say
///     Ok(())
/// })?;
/// assert_eq!(sent.len(), 3); // 10 bytes, 4 at most in each
/// assert_eq!(Bucket::parse(&sent[2])?.entries()[0].offset, 8);
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Debug, Clone, Copy)]
pub struct BucketWriter {
    capacity_bytes: usize,
}

impl BucketWriter {
    /// A writer of buckets that hold at most `capacity_bytes` bytes of weights each; the table comes on top.
    ///
    /// A few hundred MiB are usual: large enough that the number of requests doesn't matter, small enough to
    /// be in memory on both sides.
    pub fn new(capacity_bytes: usize) -> Self {
        Self { capacity_bytes }
    }

    /// Loads from `source` and hands its tensors to `each`, in the source's order, as buckets that are as
    /// full as can be. Tensors are cut between elements where a bucket ends.
    ///
    /// One bucket is in memory at a time. The last one is handed out only when the source's
    /// [`finish`](WeightSource::finish) has succeeded, so what a receiver got of a failed load is never
    /// a whole model. Tensors without elements, and the source's
    /// [`unsupported`](WeightSource::unsupported) ones, are in no bucket.
    ///
    /// # Errors
    /// What the source and `each` return; nothing is handed out after that. [`SourceError::Bucket`] for a
    /// tensor that no bucket can hold, one that is listed twice, and a capacity below one element, all before
    /// anything is read, and if there is no memory for a bucket. [`SourceError::WrongLength`] if the source
    /// delivers more or fewer bytes than it said.
    pub fn write(
        &self,
        source: &mut dyn WeightSource,
        each: &mut dyn FnMut(Vec<u8>) -> Result<(), SourceError>,
    ) -> Result<(), SourceError> {
        let specs = source.index()?;
        let tensors = self.check(&specs)?;
        source.plan(&tensors.iter().map(|tensor| tensor.position).collect::<Vec<_>>())?;
        let plan = Plan { tensors: &tensors, tensor: 0, offset: 0, capacity_bytes: self.capacity_bytes };
        let mut output = Output { plan, bucket: Vec::new(), missing_bytes: 0, each };
        for tensor in &tensors {
            let (mut received_bytes, mut result) = (0_usize, Ok(()));
            source.read(tensor.position, &mut |bytes| {
                received_bytes = received_bytes.saturating_add(bytes.len());
                if result.is_ok() && received_bytes <= tensor.bytes {
                    result = output.push(bytes);
                }
            })?;
            result?;
            if received_bytes != tensor.bytes {
                return Err(SourceError::wrong_length(tensor.spec, received_bytes));
            }
        }
        source.finish()?;
        output.hand_out()
    }

    /// The tensors that have bytes; all can be in a bucket, and none is there twice.
    fn check<'a>(&self, specs: &'a [TensorSpec]) -> Result<Vec<Tensor<'a>>, BucketError> {
        let mut tensors = Vec::new();
        for (position, spec) in specs.iter().enumerate() {
            let bytes = check::tensor(spec)?;
            if bytes == 0 {
                continue;
            }
            if spec.dtype.size() > self.capacity_bytes {
                return Err(BucketError::CapacityTooSmall {
                    tensor: cut(&spec.name).into(),
                    dtype: spec.dtype,
                    capacity_bytes: self.capacity_bytes,
                });
            }
            tensors.push(Tensor { position, spec, bytes });
        }
        check::once(tensors.iter().map(|tensor| (tensor.spec, 0, tensor.bytes)).collect())?;
        Ok(tensors)
    }
}

/// A tensor to be written.
struct Tensor<'a> {
    /// In the source's index.
    position: usize,
    spec: &'a TensorSpec,
    bytes: usize,
}

/// Where the next bucket begins. Tables are known before any byte is read, so the data can be written behind
/// them at once.
struct Plan<'a> {
    tensors: &'a [Tensor<'a>],
    tensor: usize,
    /// Bytes of that tensor that are in earlier buckets.
    offset: usize,
    capacity_bytes: usize,
}

impl Plan<'_> {
    /// Table of the next bucket and the number of its data bytes; 0 when all tensors are planned.
    fn next_bucket(&mut self) -> (String, usize) {
        let [begin, end] = TABLE_FRAME;
        let (mut table, mut filled) = (begin.to_owned(), 0);
        for entries in 0..MAX_ENTRIES {
            let Some(tensor) = self.tensors.get(self.tensor) else { break };
            let room = self.capacity_bytes - filled;
            let bytes = (room - room % tensor.spec.dtype.size()).min(tensor.bytes - self.offset);
            let entry = table::text_of(tensor.spec, self.offset, filled, filled + bytes);
            if bytes == 0 || table.len() + ",".len() + entry.len() + end.len() > MAX_TABLE_BYTES {
                break;
            }
            table.push_str(if entries == 0 { "" } else { "," });
            table.push_str(&entry);
            filled += bytes;
            self.offset += bytes;
            if self.offset == tensor.bytes {
                (self.tensor, self.offset) = (self.tensor + 1, 0);
            }
        }
        table.push_str(end);
        (table, filled)
    }
}

/// The bucket that is being filled, and where full ones go.
struct Output<'a> {
    plan: Plan<'a>,
    /// Encoded, up to the bytes that are missing; empty before the first.
    bucket: Vec<u8>,
    missing_bytes: usize,
    each: &'a mut dyn FnMut(Vec<u8>) -> Result<(), SourceError>,
}

impl Output<'_> {
    /// Takes the next bytes of the tensors, which are written one behind the other.
    fn push(&mut self, mut bytes: &[u8]) -> Result<(), SourceError> {
        while !bytes.is_empty() {
            if self.missing_bytes == 0 {
                self.hand_out()?;
                self.open()?;
            }
            let (now, later) = bytes.split_at(bytes.len().min(self.missing_bytes));
            self.bucket.extend_from_slice(now);
            self.missing_bytes -= now.len();
            bytes = later;
        }
        Ok(())
    }

    /// Hands out the bucket, which is full, if there is one.
    fn hand_out(&mut self) -> Result<(), SourceError> {
        match std::mem::take(&mut self.bucket) {
            bucket if bucket.is_empty() => Ok(()),
            bucket => (self.each)(bucket),
        }
    }

    /// Begins the next bucket. A source may be wrong about its sizes, so memory may be refused.
    fn open(&mut self) -> Result<(), BucketError> {
        let (table, data_bytes) = self.plan.next_bucket();
        let out_of_memory = || BucketError::OutOfMemory { data_bytes };
        let table_bytes = u32::try_from(table.len()).map_err(|_| out_of_memory())?;
        let prefix = prefix(table_bytes, data_bytes as u64);
        let bytes = data_bytes.checked_add(prefix.len() + table.len()).ok_or_else(out_of_memory)?;
        self.bucket.try_reserve_exact(bytes).map_err(|_| out_of_memory())?;
        self.bucket.extend_from_slice(&prefix);
        self.bucket.extend_from_slice(table.as_bytes());
        self.missing_bytes = data_bytes;
        Ok(())
    }
}
