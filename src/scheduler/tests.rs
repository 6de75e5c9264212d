//! Tests of the scheduler, against a simulated device that knows what each slot must hold.

mod cases;
mod groups;
mod properties;
mod sim;
