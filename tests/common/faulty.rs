//! Sources that fail, lie or panic.
#![allow(dead_code, unreachable_pub, reason = "each test binary uses a part")]

use dormouse::{SourceError, TensorSpec, WeightSource};

/// What a [`Faulty`] source does at its `at`-th read.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum Fault {
    Error,
    HalfThenError,
    Panic,
    HalfThenPanic,
    Short,
    Nothing,
    Long,
    Finish,
}

pub struct Faulty<S> {
    pub inner: S,
    pub fault: Fault,
    pub at: usize,
    pub reads: usize,
}

impl<S: WeightSource> WeightSource for Faulty<S> {
    fn index(&mut self) -> Result<Vec<TensorSpec>, SourceError> {
        self.inner.index()
    }

    fn read(&mut self, tensor: usize, sink: &mut dyn FnMut(&[u8])) -> Result<(), SourceError> {
        self.reads += 1;
        if self.reads != self.at + 1 {
            return self.inner.read(tensor, sink);
        }
        let mut bytes = Vec::new();
        self.inner.read(tensor, &mut |piece| bytes.extend_from_slice(piece))?;
        let half = bytes.len() / 2;
        match self.fault {
            Fault::Error => return Err(SourceError::NoSuchTensor { tensor, count: 0 }),
            Fault::HalfThenError => {
                sink(&bytes[..half]);
                return Err(SourceError::NoSuchTensor { tensor, count: 0 });
            }
            Fault::Panic => panic!("a source that panics"),
            Fault::HalfThenPanic => {
                sink(&bytes[..half]);
                panic!("a source that panics");
            }
            Fault::Short => sink(&bytes[..half]),
            Fault::Nothing => {}
            Fault::Long => {
                sink(&bytes);
                sink(&[0; 4]);
            }
            Fault::Finish => sink(&bytes),
        }
        Ok(())
    }

    fn finish(&mut self) -> Result<(), SourceError> {
        match self.fault {
            Fault::Finish => Err(SourceError::ChangedDuringRead { path: "gone".into() }),
            _ => self.inner.finish(),
        }
    }
}
