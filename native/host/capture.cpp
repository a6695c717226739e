// Stream capture: enqueuing becomes recording, events become dependencies.
//
// Invariant: a stream that captures has State::captures' object in `capture`, and its `tail` are
// the nodes that its next node will depend on. An invalid capture stays open until it is ended.
#include <algorithm>

#include "state.h"

namespace trlow_host {

static constexpr int kGlobal = 0, kRelaxed = 2;  // cudaStreamCaptureMode

void invalidate(Capture& capture) { capture.valid = false; }

void end_capture(Capture& capture) {
    State& s = state();
    capture.open = false;
    if (capture.graph) unregister_graph(*capture.graph);  // known already if it was asked for
    for (Stream* stream : capture.streams) {
        stream->capture.reset();
        stream->tail.clear();
    }
    for (auto it = s.captures.begin(); it != s.captures.end(); ++it) {
        if (it->get() == &capture) {
            s.captures.erase(it);
            return;
        }
    }
}

// cudaThreadExchangeStreamCaptureMode's rules (CUDA Runtime API, stream management).
int forbid_unsafe() {
    const Thread& me = self();
    if (me.capture_mode == kRelaxed) return 0;
    int code = 0;
    for (const auto& capture : state().captures) {
        const bool mine = capture->thread == me.id && capture->mode != kRelaxed;
        const bool global = capture->mode == kGlobal && me.capture_mode == kGlobal;
        if (mine || global) {
            invalidate(*capture);
            code = kCaptureUnsupported;
        }
    }
    return code;
}

int forbid_disturbing(int device) {
    int code = forbid_unsafe();
    for (const auto& capture : state().captures) {
        if (capture->thread == self().id) continue;  // judged by forbid_unsafe
        const bool here = std::any_of(capture->streams.begin(), capture->streams.end(),
                                      [&](const Stream* each) { return each->device == device; });
        if (here) {
            invalidate(*capture);
            code = kCaptureUnsupported;
        }
    }
    return code;
}

static void merge(std::vector<int>& into, const std::vector<int>& from) {
    into.insert(into.end(), from.begin(), from.end());
    std::sort(into.begin(), into.end());
    into.erase(std::unique(into.begin(), into.end()), into.end());
}

int add_node(Stream& stream, std::shared_ptr<const Work> work) {
    Capture& capture = *stream.capture;
    if (!capture.valid) return kCaptureInvalidated;
    Graph& graph = *capture.graph;
    auto node = std::make_unique<GraphNode>();
    node->work = std::move(work);
    node->after = stream.tail;
    node->lane = stream.number;
    node->graph = &graph;
    graph.nodes.push_back(std::move(node));
    stream.tail.assign(1, static_cast<int>(graph.nodes.size()) - 1);
    return 0;
}

int issue(Stream& stream, std::shared_ptr<const Work> work) {
    if (stream.capture) return add_node(stream, std::move(work));
    const int error = state().devices[static_cast<std::size_t>(stream.device)].error;
    if (error != 0) return error;
    enqueue(stream, std::move(work));
    return 0;
}

int begin_capture(const std::shared_ptr<Stream>& stream, int mode) {
    State& s = state();
    if (stream->capture) return kIllegalState;
    auto capture = std::make_shared<Capture>();
    capture->thread = self().id;
    capture->mode = mode;
    capture->origin = stream.get();
    capture->streams.insert(stream.get());
    capture->graph = std::make_shared<Graph>();
    stream->capture = capture;
    stream->tail.clear();
    s.captures.insert(std::move(capture));
    return 0;
}

// Every stream's last nodes must lie before the origin's: else its work would be lost.
static bool joined(const Capture& capture) {
    const auto& nodes = capture.graph->nodes;
    std::vector<char> before(nodes.size(), 0);
    for (const int node : capture.origin->tail) before[static_cast<std::size_t>(node)] = 1;
    for (std::size_t i = nodes.size(); i-- > 0;) {
        if (!before[i]) continue;
        for (const int node : nodes[i]->after) before[static_cast<std::size_t>(node)] = 1;
    }
    for (const Stream* stream : capture.streams) {
        for (const int node : stream->tail) {
            if (!before[static_cast<std::size_t>(node)]) return false;
        }
    }
    return true;
}

int finish_capture(Stream& stream, std::shared_ptr<Graph>& graph) {
    if (!stream.capture) return kIllegalState;
    const std::shared_ptr<Capture> capture = stream.capture;
    if (capture->origin != &stream) {
        invalidate(*capture);
        return kCaptureUnmatched;
    }
    if (capture->mode != kRelaxed && capture->thread != self().id) {
        return kCaptureWrongThread;
    }
    int code = 0;
    if (!capture->valid) {
        code = kCaptureInvalidated;
    } else if (!joined(*capture)) {
        code = kCaptureUnjoined;
    }
    close_ledgers(*capture, code != 0);
    end_capture(*capture);
    if (code == 0) graph = capture->graph;
    capture->graph = nullptr;
    return code;
}

int record_event(Event& event, Stream& stream) {
    if (stream.capture) {
        if (!stream.capture->valid) return kCaptureInvalidated;
        event.capture = stream.capture;
        event.tail = stream.tail;
        event.point.reset();
        return 0;
    }
    auto point = std::make_shared<Point>();
    point->stream = &stream;
    auto work = std::make_shared<Work>();
    work->kind = Kind::record;
    work->point = point;
    const int code = issue(stream, std::move(work));
    if (code != 0) return code;
    event.capture.reset();
    event.tail.clear();
    event.point = std::move(point);
    return 0;
}

static int wait_captured(const std::shared_ptr<Stream>& stream, Event& event) {
    if (!event.capture->open) return kCapturedEvent;
    if (!event.capture->valid) return kCaptureInvalidated;
    if (!stream->capture) {
        stream->capture = event.capture;
        stream->tail = event.tail;
        event.capture->streams.insert(stream.get());
        return 0;
    }
    if (stream->capture != event.capture) {
        invalidate(*stream->capture);
        invalidate(*event.capture);
        return kCaptureMerge;
    }
    merge(stream->tail, event.tail);
    return 0;
}

int wait_event(const std::shared_ptr<Stream>& stream, Event& event) {
    if (stream->capture && !stream->capture->valid) return kCaptureInvalidated;
    if (event.capture) return wait_captured(stream, event);
    if (stream->capture) {
        invalidate(*stream->capture);
        return kCaptureIsolation;
    }
    if (!event.point || event.point->done) return 0;
    auto work = std::make_shared<Work>();
    work->kind = Kind::wait;
    work->point = event.point;
    return issue(*stream, std::move(work));
}

}  // namespace trlow_host
