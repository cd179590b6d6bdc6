import MLX
import MLXLMCommon

/// A KV cache that holds a fixed number of tokens and chooses which.
///
/// While decoding, the new row overwrites the slot of the token that the policy chose to forget, and
/// that token's row is folded into the remainder. A prompt chunk is attended together with the kept
/// slots and then reduced to the budget with one gather. All of it is done by the C++ engine of c_api
/// (`Engine`); here is what mlx-swift-lm asks of a cache, and memory pressure.
///
/// A cache that attends (``attends``) is asked by ``h2oAttention(queries:keys:values:cache:scale:mask:sinks:)``
/// and runs every policy, head budgets and the exact remainder. One that does not goes into any
/// stock model: it looks at keys only, and the remainder goes in as plain rows.
///
/// Save it with ``saveCaches(_:to:metadata:)``; `savePromptCache` and `ChatSession.saveCache` cannot
/// write it.
public final class H2OKVCache: AttendingKVCache {
    /// As given. What has changed since the engine knows: ``settings``.
    fileprivate(set) var given: CacheSettings
    /// nil in a copy that failed.
    private(set) var engine: Engine?
    fileprivate(set) var pressure: PressureShare
    /// Arrays set by `state` whose names `metaState` has not given yet.
    fileprivate var unnamed: [MLXArray]?
    /// Its part in the file of its conversation; none for copies, and for what was restored.
    private(set) var file: SpilledLayer?
    private var isSpilled = false
    /// Why its rows no longer go into that file, where the engine's cache was replaced by one without.
    private var leftFile: String?
    /// Whether a prompt is read twice: meanwhile it has room for all of it, whatever the pressure.
    var isReadTwice = false {
        didSet { snapshot = nil }
    }
    /// What ``metaState`` was read of, until the cache changes.
    fileprivate var snapshot: Engine.Saved?
    /// What went wrong last where mlx-swift-lm lets nothing be thrown (``trim(_:)``, a step, a copy, a
    /// state that was set), until it is set to nil: nothing went wrong since then.
    public var failure: H2OError?

    /// What was asked for and this cache does not have.
    public internal(set) var notices: [H2ONotice] = []

    /// Whether kernels compute for this cache where there are some; plain MLX operations otherwise,
    /// slower and good for comparing.
    public var usesKernels = true {
        didSet { engine?.useKernels(usesKernels) }
    }

    /// A cache for one layer.
    ///
    /// - Parameters:
    ///   - budgets: Slots of each KV head; the remainder is not charged against them.
    ///   - policy: What chooses.
    ///   - remainder: Whether evicted tokens go on answering.
    ///   - attends: Whether the model attends through this library. Without, the policy may look at
    ///     keys only, all heads of all layers must have one budget, and the remainder goes in as
    ///     plain rows.
    ///   - packing: How keys and values are stored.
    ///   - undo: How many of the last steps can be taken back after evictions (``trim(_:)``): as many
    ///     as a draft of speculative decoding has tokens. A chunk of up to one more goes token by token,
    ///     and no step is fused on a GPU.
    ///   - frame: In which packed keys are stored, and everything that is made of them.
    ///   - saturation: Where each KV head's remainder saturates (``H2ORemainder/saturation``), or one number
    ///     for all; 0 is first order.
    ///   - rope: The RoPE of the keys, if queries are to see them without the gaps of evicted tokens
    ///     (``H2OConfiguration/Positions/rolling(_:)``). Without remainder and packing.
    ///   - pressure: What may ask for less memory while the cache is in use.
    /// - Throws: ``H2OError`` for settings out of range or a budget without room to evict.
    package convenience init(
        _ budgets: [Int], policy: any H2OPolicy = H2OPolicies.Salient(), remainder: Bool = true,
        attends: Bool = true, packing: H2OPacking = .dense, undo: Int = 0, frame: H2OFrame? = nil,
        saturation: [Float] = [H2ORemainder.saturation], rope: H2ORope? = nil,
        pressure: H2OMemoryPressure? = nil
    ) throws {
        let settings = CacheSettings(
            budgets, policy: policy, remainder: remainder, attends: attends, packing: packing,
            undo: undo, frame: frame, saturation: saturation, rope: rope)
        try self.init(settings, PressureShare(pressure, nil))
    }

    init(
        _ settings: CacheSettings, _ pressure: PressureShare, _ notices: [H2ONotice] = [],
        file: SpilledLayer? = nil
    ) throws {
        guard !settings.saturation.isEmpty else {
            throw H2OError.configuration("Give one saturation for all KV heads, or one for each.")
        }
        (given, self.pressure, self.notices, self.file) = (settings, pressure, notices, file)
        engine = try settings.engine()
    }

    private init(_ other: H2OKVCache) throws {
        (given, pressure, failure) = (other.given, other.pressure, other.failure)
        (usesKernels, notices) = (other.usesKernels, other.notices)
        engine = try other.engine?.copied()
    }

    /// One without tokens, in the place of a copy that failed.
    private init(failed other: H2OKVCache) {
        (given, pressure, failure) = (other.given, other.pressure, other.failure)
        unnamed = []
    }

    // MARK: steps

    /// Take new rows in; return what stock attention is to attend to.
    ///
    /// - Parameters:
    ///   - keys: `[B, Hk, L, D]` with RoPE applied at `offset`.
    ///   - values: `[B, Hk, L, Dv]`.
    /// - Returns: Keys `[B, Hk, N, D]` and values `[B, Hk, N, Dv]`, old and new.
    public func update(keys: MLXArray, values: MLXArray) -> (MLXArray, MLXArray) {
        reporting((keys, values)) {
            guard !attends else {
                throw H2OError.policyNeedsAttention(policy: policy.name, model: "this model")
            }
            return try ready(keys, values).update(keys: keys, values: values)
        }
    }

    package func attend(
        queries: MLXArray, keys: MLXArray, values: MLXArray, scale: Float,
        mask: MLXFast.ScaledDotProductAttentionMaskMode = .none, sinks: MLXArray? = nil
    ) -> MLXArray {
        reporting(.zeros(queries.shape.dropLast() + values.shape.suffix(1), dtype: queries.dtype)) {
            try ready(keys, values).attend(
                queries: queries, keys: keys, values: values, scale: scale, mask: mask,
                sinks: sinks)
        }
    }

    /// Where nothing can be thrown an error is ``failure``, and MLX's, as of an operation of MLX that
    /// fails: `withError` throws it, and outside of it the process ends with its message.
    func reporting<Result>(
        _ instead: @autoclosure () -> Result, _ body: () throws -> Result
    ) -> Result {
        do {
            return try body()
        } catch {
            failure = error as? H2OError ?? .internal(error.localizedDescription)
            reportToMLX(error)
            return instead()
        }
    }

    /// The engine for a step with these rows.
    private func ready(_ keys: MLXArray, _ values: MLXArray) throws -> Engine {
        guard unnamed == nil, let engine else { throw Self.lacksState }
        snapshot = nil
        let types = RowTypes(keys: keys, values: values)
        if let own = engine.rowTypes {
            if own != types { try recast(from: own, to: types) }
        } else {
            try types.check()
            if let file, offset == 0, !isSpilled {
                try engine.spill(to: file)
                isSpilled = true
            }
        }
        try follow(to: offset + keys.dim(2))
        return self.engine!
    }

    /// The engine for a prompt that is read twice.
    func readyToRead() throws -> Engine {
        guard unnamed == nil, let engine else { throw Self.lacksState }
        try follow(to: offset)  // and know the slots without pressure
        return engine
    }

    private static let lacksState = H2OError.state(
        "The state of this cache was set without its metaState, or it is a copy that failed.")

    fileprivate func use(_ engine: Engine?) {
        self.engine = engine
        if !usesKernels { engine?.useKernels(false) }
    }

    /// Have keys and values in the model's dtypes, where they were saved in others.
    private func recast(from own: RowTypes, to types: RowTypes) throws {
        guard own.fits(types) else {
            throw H2OError.state(
                "This cache holds \(own), and the model makes \(types): it is another model's. "
                    + "(H2OKVCache.loadCaches(from:for:) tells in time.)")
        }
        try types.check()
        let saved = try engine!.saved()
        let cast = Dictionary(
            uniqueKeysWithValues: saved.arrays.map { name, array in
                (name, array.dtype == .uint32 ? array : given.packing.cast(name, array, types))
            })
        try engine!.hold(Engine.Saved(arrays: cast, settings: saved.settings), policy: policy)
        if !usesKernels { engine!.useKernels(false) }
        leaveFile("the model's rows are of another dtype now")
    }

    /// Goes on without the file, where the engine's cache is another one now.
    fileprivate func leaveFile(_ why: String) {
        if file != nil, isSpilled || offset > 0, leftFile == nil { leftFile = why }
    }

    /// Obey a lowered fraction of the slots, if there is one, before a step that makes the conversation
    /// one of so many tokens.
    private func follow(to tokens: Int) throws {
        guard let engine, !isReadTwice else { return }
        let lowered = pressure.lowered(
            engine.plan, at: offset,
            fewest: given.fewestSlots(pinned: engine.pins.reduce(0) { $0 + $1.count }))
        if let lowered { try engine.resize(lowered.grown(to: tokens)) }
    }

    /// The mask that models ask for before n new tokens.
    ///
    /// - Returns: None or causal where attention is ours, or booleans `[n, kept + n]` if asked for an
    ///   array; with plain rows an array `[1, 1, n, rows + kept + n]` to add to the logits.
    public func makeMask(
        n: Int, windowSize: Int?, returnArray: Bool
    ) -> MLXFast.ScaledDotProductAttentionMaskMode {
        reporting(.none) {
            guard windowSize == nil else {
                throw H2OError.partial(
                    "This model masks a sliding window over a full cache, which a bounded cache "
                        + "cannot serve: leave that layer's own cache in place.")
            }
            guard let engine else { throw Self.lacksState }
            if offset > 0 { try follow(to: offset) }
            return try engine.makeMask(n: n, asArray: returnArray)
        }
    }

    // MARK: between steps

    /// Why the conversation has no file of its rows although there was to be one (``H2OConfiguration/spill``),
    /// or why it gets no more of them; nil while all is well. The conversation goes on without it.
    public var spillFailure: String? { leftFile ?? file?.spill.failure }

    /// Evicted rows that came back from the file so far, over all KV heads.
    public var rowsReturned: Int { reporting(0) { try engine?.rowsReturned ?? 0 } }

    public func copy() -> any KVCache {
        reporting(H2OKVCache(failed: self)) { try H2OKVCache(self) }
    }

}

extension H2OKVCache {
    /// Change the budget; what no longer fits goes into the remainder.
    ///
    /// Between steps only, and for all layers of a stock model alike.
    ///
    /// - Parameter budgets: Slots of each KV head, or one number for all. The remainder is not
    ///   charged again.
    /// - Throws: ``H2OError/configuration(_:)`` for a budget without room to evict; nothing is changed.
    public func resize(_ budgets: [Int]) throws {
        try changing {
            let heads = $0.plan.budgets.count
            try $0.resize(
                SlotPlan(
                    budgets: budgets.count == 1
                        ? Array(repeating: budgets[0], count: heads) : budgets))
        }
    }

    /// Take back the newest n tokens, or as many of them as ``undoableSteps`` says.
    ///
    /// The cache then holds what ``offset`` tells, exactly. Where that is more than was asked for,
    /// ``failure`` and the log say so: the tokens that stay are attended to like any others.
    /// `ChatSession` looks at what this returns, and begins anew; what does not (speculative decoding)
    /// goes on with drafts that were never said, unless ``undo`` is as many.
    ///
    /// - Returns: How many were taken back.
    @discardableResult
    public func trim(_ n: Int) -> Int {
        let wanted = min(n, offset), possible = min(wanted, undoableSteps)
        guard wanted > 0 else { return 0 }
        return reporting(0) {
            try undoSteps(possible)
            if possible < wanted {
                let lost = Self.tooFar(wanted, possible)
                failure = .state(lost)
                H2ONotice(subject: .undo, message: "trim took \(possible) of \(wanted): \(lost)")
                    .log()
            }
            return possible
        }
    }

    /// Take back the newest n tokens.
    ///
    /// - Throws: ``H2OError/state(_:)`` if not so many can be taken back; nothing is then.
    public func undoSteps(_ n: Int) throws {
        guard 0 ... undoableSteps ~= n else { throw H2OError.state(Self.tooFar(n, undoableSteps)) }
        guard n > 0 else { return }
        try engine?.undoSteps(n)
        snapshot = nil
    }

    private static func tooFar(_ n: Int, _ most: Int) -> String {
        "\(n) tokens cannot be taken back, \(most) can: make the cache with undo: \(n) or more "
            + "(speculative decoding needs the number of draft tokens)."
    }

    /// Do something to the engine between steps.
    func changing(_ body: (Engine) throws -> Void) throws {
        guard let engine else { throw Self.lacksState }
        try body(engine)
        snapshot = nil
    }
}

// MARK: saving

extension H2OKVCache {
    /// All that it holds.
    func saved() throws -> Engine.Saved {
        if let snapshot { return snapshot }
        guard let engine else { throw Self.lacksState }
        return try engine.saved()
    }

    /// Hold what was saved of a cache.
    ///
    /// - Throws: ``H2OError/file(_:)`` for anything that no cache can have saved; nothing is changed then.
    func restore(_ saved: Engine.Saved) throws {
        let json = try H2OSettingValue(parsing: saved.settings)
        guard let runs = json["runs"]?.array else {
            throw H2OError.file("this is no state of an H2OKVCache: it has no runs.")
        }
        let settings = try CacheSettings(json, frame: H2OFrame(saved: saved.arrays))
        let restored = try Engine(saved, policy: settings.policy)
        use(restored)
        (given, snapshot, failure) = (settings, nil, nil)
        leaveFile("the cache's state was set")
        pressure.adopt(runs.isEmpty ? nil : restored.plan)
    }

    /// Arrays in the order in which ``metaState`` names them. While kernels decode, what they wrote
    /// last, as in ``innerState()``: it may be evaluated with every token.
    public var state: [MLXArray] {
        get {
            if snapshot == nil, let engine, engine.isFused { return innerState() }
            return reporting([]) { try saved().arrays.sorted { $0.key < $1.key }.map(\.value) }
        }
        set { unnamed = newValue }
    }

    /// The configuration as JSON, then names of ``state``'s arrays. Read it before them, set it after.
    public var metaState: [String] {
        get {
            reporting([]) {
                let saved = try self.saved()
                snapshot = saved
                return [saved.settings] + saved.arrays.keys.sorted()
            }
        }
        set {
            let arrays = unnamed ?? []
            unnamed = nil
            reporting(()) {
                guard newValue.count == arrays.count + 1 else {
                    throw H2OError.state(
                        "This metaState does not go with this state: read metaState first, then "
                            + "state.")
                }
                let named = Dictionary(zip(newValue.dropFirst(), arrays)) { first, _ in first }
                try restore(Engine.Saved(arrays: named, settings: newValue[0]))
            }
        }
    }
}
