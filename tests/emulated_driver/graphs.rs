//! Stream capture: work is recorded with its parameters, and graphs do it again.

use std::ptr;

use cudarc::driver::sys::{CUgraph, CUgraphExec, CUresult, CUstream, CUstreamCaptureMode};

use crate::session::{Outcome, Saxpy, Session, call, register, unregister};

const COUNT: u32 = 100;
const BYTES: usize = COUNT as usize * 4;

fn begin(stream: CUstream) -> Outcome {
    call!(cuStreamBeginCapture_v2(stream, CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_THREAD_LOCAL))
}

fn end(stream: CUstream) -> Outcome<CUgraph> {
    let mut graph = ptr::null_mut();
    call!(cuStreamEndCapture(stream, &mut graph)).map(|()| graph)
}

/// Makes a graph executable and forgets what it was made from.
fn instantiate(graph: CUgraph) -> CUgraphExec {
    let mut exec = ptr::null_mut();
    call!(cuGraphInstantiateWithFlags(&mut exec, graph, 0)).unwrap();
    call!(cuGraphDestroy(graph)).unwrap();
    exec
}

#[test]
fn a_graph_repeats_its_work() {
    for seed in 0..10 {
        let session = Session::seeded(seed);
        let (saxpy, stream) = (Saxpy::new(&session), session.stream().unwrap());
        let (x, y) = (session.alloc(BYTES).unwrap(), session.alloc(BYTES).unwrap());
        let mut input = vec![1f32; COUNT as usize];
        register(&mut input).unwrap();
        session.write(y, &[0f32; COUNT as usize], stream).unwrap();

        begin(stream).unwrap();
        session.write(x, &input, stream).unwrap();
        saxpy.launch(2.0, x, y, COUNT, stream).unwrap();
        let exec = instantiate(end(stream).unwrap());
        let mut out = vec![0f32; COUNT as usize];
        session.read(&mut out, y, stream).unwrap();
        assert_eq!(out[0], 0.0, "nothing of the capture ran");

        // The parameters are those of the capture; the input is what is there when the copy runs.
        for _ in 0..3 {
            call!(cuGraphLaunch(exec, stream)).unwrap();
        }
        call!(cuStreamSynchronize(stream)).unwrap();
        input.fill(10.0);
        call!(cuGraphLaunch(exec, stream)).unwrap();
        session.read(&mut out, y, stream).unwrap();
        assert!(out.iter().all(|&value| value == 3.0 * 2.0 + 20.0));

        unregister(&mut input).unwrap();
        call!(cuGraphExecDestroy(exec)).unwrap();
        saxpy.unload().unwrap();
        call!(cuMemFree_v2(x)).unwrap();
        call!(cuMemFree_v2(y)).unwrap();
        call!(cuStreamDestroy_v2(stream)).unwrap();
        session.end();
    }
}

/// Two streams that a capture forks into and joins; `y` is what both wrote in turn.
#[test]
fn a_graph_keeps_the_order_of_its_streams() {
    for seed in 0..20 {
        let session = Session::seeded(seed);
        let saxpy = Saxpy::new(&session);
        let (main, side) = (session.stream().unwrap(), session.stream().unwrap());
        let (forked, joined) = (session.event().unwrap(), session.event().unwrap());
        let (x, y) = (session.alloc(BYTES).unwrap(), session.alloc(BYTES).unwrap());

        begin(main).unwrap();
        call!(cuMemsetD8Async(y, 0, BYTES, main)).unwrap();
        call!(cuEventRecord(forked, main)).unwrap();
        call!(cuStreamWaitEvent(side, forked, 0)).unwrap();
        call!(cuMemsetD8Async(x, 0, BYTES, side)).unwrap();
        saxpy.launch(2.0, x, y, COUNT, side).unwrap();
        call!(cuEventRecord(joined, side)).unwrap();
        assert_eq!(end(side), Err(CUresult::CUDA_ERROR_STREAM_CAPTURE_UNMATCHED));
        call!(cuStreamWaitEvent(main, joined, 0)).unwrap();
        call!(cuMemcpyDtoDAsync_v2(x, y, BYTES, main)).unwrap();
        assert_eq!(call!(cuEventQuery(joined)), Err(CUresult::CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED));
        assert_eq!(end(main), Err(CUresult::CUDA_ERROR_STREAM_CAPTURE_INVALIDATED));

        begin(main).unwrap();
        call!(cuMemsetD8Async(y, 0, BYTES, main)).unwrap();
        call!(cuEventRecord(forked, main)).unwrap();
        call!(cuStreamWaitEvent(side, forked, 0)).unwrap();
        call!(cuMemsetD8Async(x, 0, BYTES, side)).unwrap();
        call!(cuEventRecord(joined, side)).unwrap();
        call!(cuStreamWaitEvent(main, joined, 0)).unwrap();
        saxpy.launch(2.0, x, y, COUNT, main).unwrap();
        let exec = instantiate(end(main).unwrap());
        assert_eq!(call!(cuEventQuery(joined)), Err(CUresult::CUDA_ERROR_CAPTURED_EVENT));

        call!(cuGraphLaunch(exec, main)).unwrap();
        call!(cuGraphLaunch(exec, side)).unwrap();
        call!(cuCtxSynchronize()).unwrap();
        let mut out = vec![1f32; COUNT as usize];
        session.read(&mut out, y, side).unwrap();
        assert!(out.iter().all(|&value| value == 0.0));
        call!(cuGraphExecDestroy(exec)).unwrap();
        saxpy.unload().unwrap();
        for (stream, event) in [(main, forked), (side, joined)] {
            call!(cuEventDestroy_v2(event)).unwrap();
            call!(cuStreamDestroy_v2(stream)).unwrap();
        }
        call!(cuMemFree_v2(x)).unwrap();
        call!(cuMemFree_v2(y)).unwrap();
        session.end();
    }
}

#[test]
fn what_cannot_be_recorded_ends_the_capture() {
    let session = Session::new();
    let (stream, other) = (session.stream().unwrap(), session.stream().unwrap());
    let (event, memory) = (session.event().unwrap(), session.alloc(BYTES).unwrap());
    let unsupported = Err(CUresult::CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED);
    let forbidden: [(&str, &dyn Fn() -> Outcome); 7] = [
        ("synchronising the stream", &|| call!(cuStreamSynchronize(stream))),
        ("synchronising the context", &|| call!(cuCtxSynchronize())),
        ("allocating", &|| session.alloc(64).map(|_| ())),
        ("creating physical memory", &|| session.create(4096).map(|_| ())),
        ("freeing", &|| call!(cuMemFree_v2(memory))),
        ("querying", &|| call!(cuEventQuery(event))),
        ("copying from pageable memory", &|| session.write(memory, &[1u8; 4], stream)),
    ];
    for (what, call) in forbidden {
        begin(stream).unwrap();
        assert_eq!(call(), unsupported, "{what}");
        let fill = call!(cuMemsetD8Async(memory, 0, BYTES, stream));
        assert_eq!(fill, Err(CUresult::CUDA_ERROR_STREAM_CAPTURE_INVALIDATED), "{what}");
        assert_eq!(end(stream), Err(CUresult::CUDA_ERROR_STREAM_CAPTURE_INVALIDATED), "{what}");
    }
    assert_eq!(end(stream), Err(CUresult::CUDA_ERROR_ILLEGAL_STATE));

    begin(stream).unwrap();
    call!(cuEventRecord(event, stream)).unwrap();
    call!(cuStreamWaitEvent(other, event, 0)).unwrap();
    call!(cuMemsetD8Async(memory, 0, BYTES, other)).unwrap();
    assert_eq!(end(stream), Err(CUresult::CUDA_ERROR_STREAM_CAPTURE_UNJOINED));

    call!(cuEventRecord(event, other)).unwrap();
    begin(stream).unwrap();
    let isolation = Err(CUresult::CUDA_ERROR_STREAM_CAPTURE_ISOLATION);
    assert_eq!(call!(cuStreamWaitEvent(stream, event, 0)), isolation, "of work outside the capture");
    assert_eq!(end(stream), Err(CUresult::CUDA_ERROR_STREAM_CAPTURE_INVALIDATED));
    call!(cuCtxSynchronize()).unwrap();
    call!(cuEventDestroy_v2(event)).unwrap();
    call!(cuMemFree_v2(memory)).unwrap();
    for stream in [stream, other] {
        call!(cuStreamDestroy_v2(stream)).unwrap();
    }
    session.end();
}

#[test]
fn a_graph_must_find_its_memory() {
    let session = Session::new();
    let (saxpy, stream) = (Saxpy::new(&session), session.stream().unwrap());
    let (x, y) = (session.alloc(BYTES).unwrap(), session.alloc(BYTES).unwrap());
    begin(stream).unwrap();
    saxpy.launch(2.0, x, y, COUNT, stream).unwrap();
    let exec = instantiate(end(stream).unwrap());
    call!(cuMemFree_v2(x)).unwrap();
    assert!(session.device.violations().is_empty());
    assert_eq!(call!(cuGraphLaunch(exec, stream)), Err(CUresult::CUDA_ERROR_ILLEGAL_ADDRESS));
    let violations = session.device.violations();
    assert!(
        violations.len() == 1 && violations[0].ends_with("was given memory which is gone"),
        "{violations:?}"
    );
    assert_eq!(session.device.live(), "1 allocations, 1 streams, 1 modules, 1 executable graphs, 1 contexts");
}
