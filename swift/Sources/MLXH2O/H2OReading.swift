import Foundation
import MLX
import MLXLMCommon

/// How a prompt is read that is longer than the memory.
///
/// Read once, a prompt is evicted while it is read, by what a policy foresees. Read twice, all of it is
/// there while the model is asked to repeat it; then the rows that this second reading looked at are kept.
/// It knows facts in memory in which one reading knows none, and takes two to three times as long. Meanwhile
/// all rows of the prompt are held, packed as ``H2OConfiguration/packing`` says, beside the bound.
///
/// It needs a model that attends through this library, with ``H2OConfiguration/Positions/absolute``
/// positions and without ``H2OPacking/recentBits``. Of a conversation with a file of rows (``H2OSpill``) only
/// the first prompt can be read so.
public enum H2OReading: String, Sendable, CaseIterable {
    /// Once.
    case once
    /// Twice what does not fit the memory; where that cannot be it is an error.
    case twice
    /// Twice up to ``longest`` tokens, where it can be and takes no more than ``seconds``.
    case auto

    /// The longest prompt that ``auto`` reads twice: all its rows are held meanwhile.
    public static let longest = 2048
    /// The most seconds that ``auto`` spends on the second reading, to judge by the first.
    public static let seconds = 60.0
    /// Tokens at the end of a prompt that are read once: the question, and what an answer goes on from. Every
    /// head has room for them.
    public static let newest = 16
    /// The request to the model to repeat a text; give its tokens, without special ones.
    public static let request = "\n\nRepeat the previous context exactly:\n\n"

    /// Read the beginning of new tokens twice, if that is worth while; the others are still to come.
    ///
    ///     let request = tokenizer.encode(text: H2OReading.request, addSpecialTokens: false)
    ///     let done = try H2OReading.twice.read(tokens, by: model, into: caches, request: request)
    ///     // generate from tokens.dropFirst(done.tokens), with these caches
    ///
    /// A task that is cancelled stops between two chunks. Wherever it ends early, the caches are back within
    /// their bound and hold what ``H2OKVCache/offset`` says of the prompt, read once.
    ///
    /// - Parameters:
    ///   - tokens: The new tokens of one conversation. The last ``newest`` are left to the caller.
    ///   - model: The model.
    ///   - caches: Its caches, of ``H2OConfiguration/caches(for:)-(LanguageModel)``, with what was said before.
    ///   - request: The tokens of ``request``.
    ///   - chunk: Tokens that go through the model at once, beside the request.
    ///   - progress: Called with the tokens done, of which there are two for each, and all of them.
    /// - Returns: How many of the tokens were read, and how often: none, and once, where they are still to be
    ///   read.
    /// - Throws: ``H2OError/configuration(_:)`` where ``twice`` cannot be; `CancellationError`; what goes wrong
    ///   in the model or its caches.
    @discardableResult
    public func read(
        _ tokens: [Int], by model: any LanguageModel, into caches: [any KVCache], request: [Int],
        chunk: Int = 256, progress: (_ done: Int, _ all: Int) -> Void = { _, _ in }
    ) throws -> (tokens: Int, readings: Int) {
        try read(tokens, into: caches, request: request, chunk: chunk, progress: progress) {
            _ = model($0, cache: $1)
        }
    }

    /// The same by any host: `forward` calls a model with tokens `[1, L]` and caches, which it attends to
    /// through ``h2oAttention(queries:keys:values:cache:scale:mask:sinks:)``. What the model returns need not
    /// be evaluated.
    @discardableResult
    public func read(
        _ tokens: [Int], into caches: [any KVCache], request: [Int], chunk: Int = 256,
        progress: (_ done: Int, _ all: Int) -> Void = { _, _ in },
        forward: (MLXArray, [any KVCache]) throws -> Void
    ) throws -> (tokens: Int, readings: Int) {
        try read(
            tokens, into: caches, request: request, chunk: chunk,
            seconds: self == .auto ? Self.seconds : .infinity, progress: progress, forward: forward)
    }

    /// The same, unless the first reading took more seconds.
    func read(
        _ tokens: [Int], into caches: [any KVCache], request: [Int], chunk: Int, seconds: Double,
        progress: (_ done: Int, _ all: Int) -> Void,
        forward: (MLXArray, [any KVCache]) throws -> Void
    ) throws -> (tokens: Int, readings: Int) {
        try Limits.check("chunk", chunk, in: 1 ... Limits.mostTokens)
        let prompt = tokens.dropLast(Self.newest).map { Int32(clamping: $0) }
        let bounded = placedMembers(of: caches).compactMap { $0.cache as? H2OKVCache }
        guard self != .once, Self.exceedsSlots(bounded, prompt.count),
            self != .auto || prompt.count <= Self.longest
        else { return (0, 1) }
        let readings: TwoReadings
        do {
            readings = try TwoReadings(bounded, length: prompt.count)
        } catch H2OError.configuration(_) where self == .auto {
            return (0, 1)
        }
        let chunks = stride(from: 0, to: prompt.count, by: chunk).map {
            Array(prompt[$0 ..< min($0 + chunk, prompt.count)])
        }
        var done = 0
        func read(_ first: [Int32], _ chunk: [Int32], _ caches: [any KVCache]) throws {
            let tokens = first + chunk
            try withError { try forward(MLXArray(tokens, [1, tokens.count]), caches) }
            done += chunk.count
        }
        do {
            let begun = Date()
            for chunk in chunks {
                try Task.checkCancellation()
                try read([], chunk, caches)
                try withError { eval(caches) }
                progress(done, 2 * prompt.count)
            }
            if Date().timeIntervalSince(begun) > seconds {
                try readings.abandon()
                progress(2 * prompt.count, 2 * prompt.count)
                return (prompt.count, 1)
            }
            let again = request.map { Int32(clamping: $0) }
            for chunk in chunks {
                try Task.checkCancellation()
                try read(again, chunk, secondReadingCaches(of: caches, readings.engine))
                // The logits are not computed.
                let state = try readings.engine.state()
                try withError { eval(state) }
                progress(done, 2 * prompt.count)
            }
            try Task.checkCancellation()
            try readings.finish()
            return (prompt.count, 2)
        } catch {
            try? readings.abandon()  // what went wrong first is thrown
            guard error is MLXError else { throw error }
            throw bounded.lazy.compactMap(\.failure).first
                ?? .internal(error.localizedDescription)
        }
    }

    /// Whether so many new tokens are more than a head's slots, in the mean.
    private static func exceedsSlots(_ caches: [H2OKVCache], _ length: Int) -> Bool {
        let slots = caches.flatMap { $0.engine?.plan.budgets ?? [] }
        return !slots.isEmpty && length > slots.reduce(0, +) / slots.count
    }
}

/// The bounded caches of a conversation while a prompt is read twice.
private final class TwoReadings {
    let engine: EngineReadings
    private let caches: [H2OKVCache]

    init(_ caches: [H2OKVCache], length: Int) throws {
        self.caches = caches
        engine = try EngineReadings(
            caches.map { try $0.readyToRead() }, length: length, room: H2OReading.newest)
        for cache in caches { cache.isReadTwice = true }
    }

    func finish() throws {
        try engine.finish()
        end()
    }

    func abandon() throws {
        defer { end() }
        try engine.abandon()
    }

    private func end() { for cache in caches { cache.isReadTwice = false } }
}
