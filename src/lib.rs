//! dormouse
mod completion;
mod device;
mod request;
mod sampling;
mod weights;
pub use completion::{
    Completion, CompletionError, FinishReason, RequestId, RequestOutput, StopCause, TokenLogprob, VersionSpan,
};
pub use device::DeviceError;
pub use request::{Request, RequestError, RequestLimits, SamplingParams, TokenId, TokenList};
pub use weights::{DType, TensorSpec, WeightVersion, WeightsDigest};
