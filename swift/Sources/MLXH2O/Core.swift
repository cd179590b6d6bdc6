import MLX

/// A layer from step to step: new tokens come in, attend, and others are forgotten for them.
///
/// ``updateAndAttend(_:)`` is the whole of a step: what it calls is in Layer.swift, and attention in
/// Observe.swift. Where kernels take the step, a ``GPUDecoder`` has the layer's rows meanwhile, and
/// everything that looks at them calls ``rest()`` first.
struct Core {
    // Where the rows are read after every step, each would wait for the GPU and copy them all: so
    // often, then no more before the next prompt.
    private static let mostBriefDecodings = 3

    /// As given. (Since the first rows the layer knows its size: ``settings``.)
    private var given: CacheSettings
    /// nil before the first rows, which tell the widths. Its rows may be lent: ``layerAtRest()``.
    private(set) var layer: Layer?
    /// Has the layer's rows while kernels decode.
    private var decoder: GPUDecoder?
    /// How often in a row the rows were taken back after a single step.
    private var briefDecodings = 0
    private var journal: Journal
    private var pressure: PressureShare

    init(_ settings: CacheSettings, _ pressure: PressureShare) {
        (given, self.pressure) = (settings, pressure)
        journal = Journal(limit: settings.undo)
    }

    // MARK: a step

    /// Take new tokens in, attend to what is kept and to them, then choose what to forget.
    ///
    /// A chunk short enough to be taken back again, as a draft is, goes token by token.
    ///
    /// - Returns: `[B, Hq, L, Dv]`.
    mutating func updateAndAttend(_ tokens: NewTokens) -> MLXArray {
        let isFirst = layer == nil
        begin(tokens.keys, tokens.values)
        if !isFirst, let kernels = kernels(for: tokens) {
            checkSinks(of: tokens)
            return fusedStep(tokens, kernels)
        }
        rest()
        return attend(entered(tokens))
    }

    /// The same in MLX's operations, of tokens that are in the layer's frame.
    private mutating func attend(_ tokens: NewTokens) -> MLXArray {
        guard given.undo > 0, 2 ... given.undo + 1 ~= tokens.count else { return step(tokens) }
        let outputs = (0 ..< tokens.count).map { step(tokens.part($0 ..< $0 + 1)) }
        return joined(outputs, axis: 2)
    }

    /// The tokens in the layer's frame, if it has one: all else that sees them is behind this door.
    /// (Kernels of a fused step enter it themselves.)
    private func entered(_ tokens: NewTokens) -> NewTokens {
        checkSinks(of: tokens)
        return layer!.frame?.entered(tokens) ?? tokens
    }

    /// Stop with a message where a frame would move other columns and not the attention sinks.
    private func checkSinks(of tokens: NewTokens) {
        guard tokens.sinks != nil, let frame = layer!.settings.frame else { return }
        require(
            frame.isCentredAtZero,
            "Attention sinks are a column that a frame's centre does not move with the others: give "
                + "this model's caches frames whose centres are all zero, or none.")
    }

    /// One token or one chunk in MLX's operations.
    private mutating func step(_ tokens: NewTokens) -> MLXArray {
        var before = remember(tokens)
        let overflow = layer!.takeIn(keys: tokens.keys, values: tokens.values, noting: &before)
        if let before { journal.append(before) }
        let (output, seen) = layer!.observe(tokens, layer!.attended(overflow))
        layer!.settle(seen)
        return depends(input: output, dependencies: layer!.sideState)
    }

    /// One token in one fused step.
    private mutating func fusedStep(_ tokens: NewTokens, _ kernels: MetalKernels) -> MLXArray {
        if layer!.isOutOfRoom {
            rest()
            layer!.makeRoom()
        }
        if decoder == nil {
            decoder = GPUDecoder(lent: &layer!, architecture: kernels.architecture)
        }
        return layer!.step(tokens, through: decoder!)
    }

    /// Take new rows in for stock attention: the keys and values that it is to attend to.
    mutating func update(keys: MLXArray, values: MLXArray) -> (MLXArray, MLXArray) {
        begin(keys, values)
        var none: StepBefore?
        let overflow = layer!.takeIn(keys: keys, values: values, noting: &none)
        let rows = layer!.handOut(overflow)
        layer!.settle(layer!.attended(overflow))
        return (depends(input: rows.keys, dependencies: layer!.sideState), rows.values)
    }

    /// The kernels for a fused step, or nil where there is none. The first rows of a layer, and of
    /// one whose rows are read after each step, go in MLX's operations.
    private func kernels(for tokens: NewTokens) -> MetalKernels? {
        guard let layer, briefDecodings < Self.mostBriefDecodings else { return nil }
        // A step that brings a pinned token is taken here, where it is marked on its way in.
        if layer.nextIsPinned { return nil }
        return GPUDecoder.kernels(for: tokens, given)
    }

    /// What it takes to take a step back, where that can be asked for.
    private mutating func remember(_ tokens: NewTokens) -> StepBefore? {
        if tokens.count == 1 { return given.undo > 0 ? layer!.before : nil }
        briefDecodings = 0
        if given.undo > 0 { journal.begin(Journal.Chunk(before: layer!, tokens: tokens)) }
        return nil
    }

    /// Make the layer with the first rows, and have it of the size that its tokens are to have.
    private mutating func begin(_ keys: MLXArray, _ values: MLXArray) {
        let types = RowTypes(keys: keys, values: values)
        if layer?.rowTypes != types {
            types.check()
            if let held = layer?.rowTypes {
                require(
                    held.fits(types),
                    "This cache holds \(held), and the model makes \(types): it is another model's. "
                        + "(H2OKVCache.loadCaches(from:for:) tells in time.)")
                rest()
                layer!.cast(to: types)
            } else {
                layer = makeLayer(types, tokens: keys.dim(2))
            }
        }
        follow(to: offset + keys.dim(2))
    }

    private mutating func makeLayer(_ types: RowTypes, tokens: Int) -> Layer {
        do {
            let (full, reserved) = try given.plan(for: types)
            _ = try given.recentWindow(full.budgets)
            let plan = pressure.begin(full, fewest: given.fewestSlots).grown(to: tokens)
            return try Layer(given, types, plan, reserved: reserved)
        } catch {
            fatalError(
                error.localizedDescription + " (H2OConfiguration.caches(for:) tells in time.)")
        }
    }

    /// Have the slots of a conversation of so many tokens, and obey a lowered fraction of them, if there
    /// is one.
    mutating func follow(to tokens: Int) {
        guard let layer else { return }
        let lowered = pressure.lowered(
            layer.plan, at: layer.offset, fewest: layer.settings.fewestSlots)
        let later = lowered?.later ?? layer.settings.filling
        let isDue = later.first?.hasBegun(at: tokens) ?? false
        guard lowered != nil || isDue else { return }
        rest()
        // Stages were checked, and the fewest slots are such as the policy can work with.
        try! self.layer!.resize((lowered ?? layer.plan).grown(to: tokens))
        journal.removeAll()
    }

    // MARK: between steps

    /// Have the rows in the layer and not with kernels.
    private mutating func rest() {
        guard let decoder else { return }
        self.decoder = nil
        briefDecodings = decoder.steps > 1 ? 0 : briefDecodings + 1
        decoder.end(&layer!)
    }

    /// The layer with all its rows, to be looked at; nil before the first.
    mutating func layerAtRest() -> Layer? {
        rest()
        return layer
    }

    /// The same once more, for a cache of its own.
    mutating func copied() -> Core {
        rest()
        var twin = self
        twin.briefDecodings = 0
        return twin
    }

    /// Change the slots of each head (or of all, with one number); what no longer fits is folded.
    ///
    /// - Throws: ``H2OError/configuration(_:)`` for budgets without room to evict; nothing is changed.
    mutating func resize(_ budgets: [Int]) throws {
        rest()
        let heads = layer?.rowTypes.heads ?? 1
        let budgets = budgets.count == 1 ? Array(repeating: budgets[0], count: heads) : budgets
        if layer != nil && budgets.count != heads {
            throw H2OError.configuration("Give one budget for each of \(heads) KV heads.")
        }
        try given.check(budgets: budgets)
        guard let held = layer else {
            let roomy = try given.withRoomForPins(budgets)
            given = given.with(size: roomy.count == 1 ? .tokens(roomy[0]) : .heads(roomy))
            return
        }
        let roomy = try PinnedPositions.room(
            for: held.settings.pins, in: budgets, given.policy)
        try layer!.resize(SlotPlan(budgets: roomy))
        journal.removeAll()
    }

    /// Pin these positions, in order, and nothing else.
    ///
    /// - Throws: ``H2OError/configuration(_:)`` for too many; nothing is changed.
    mutating func hold(pins: [Range<Int>]) throws {
        guard let now = layer else {
            given = try given.with(pins: pins)
            return
        }
        let settings = try now.settings.pinning(pins)
        let roomy = try PinnedPositions.room(for: pins, in: now.budgets, given.policy)
        layer!.hold(pinsOf: settings)
        if roomy != now.budgets {
            try layer!.resize(SlotPlan(budgets: roomy, later: settings.filling))
        }
        journal.removeAll()
    }

    /// As of ``H2OKVCache/newTurn(carry:)``.
    mutating func newTurn(carry: Double) throws {
        guard 0 ... 1 ~= carry else {
            throw H2OError.configuration("carry is a number from 0 to 1; got \(carry).")
        }
        rest()
        guard carry < 1, layer != nil else { return }
        layer!.newTurn(carry: carry)
        journal.removeAll()
    }

    /// Take back the newest n tokens, which can be.
    mutating func takeOff(_ n: Int) {
        rest()
        if let chunk = journal.chunk, n < chunk.tokens.count {
            layer = chunk.before
            // A shorter chunk in its place; of its output nothing is computed.
            _ = attend(chunk.tokens.part(0 ..< chunk.tokens.count - n))
            return
        }
        let steps = journal.removeLast(n)
        layer?.putBack(steps)
        layer?.dropNewest(n - steps.count)
    }

    /// Hold what was saved of a cache with the same settings.
    ///
    /// - Throws: ``H2OError/file(_:)`` unless it is such as this cache could have; nothing is changed
    ///   then.
    mutating func restore(_ arrays: [String: MLXArray], _ configuration: SettingValue) throws {
        guard let runs = configuration["runs"]?.array else {
            throw H2OError.file("this is no state of an H2OKVCache.")
        }
        // The rows are in their own frame, whatever this cache had, and have slots of their own.
        let settings = try settings.with(frame: SavedState.frame(arrays))
            .sized(as: configuration)
        let restored =
            runs.isEmpty
            ? nil : Layer(settings, try SavedState(arrays, configuration, of: settings))
        (given, layer, decoder) = (settings, restored, nil)
        journal.removeAll()
        if let restored { pressure.adopt(restored.plan) }
    }
}

// MARK: what is known without taking rows back

extension Core {
    /// What it is to be; its size is `.heads` since the first rows.
    var settings: CacheSettings { layer?.settings ?? given }

    var offset: Int { layer?.offset ?? 0 }
    var hasEvicted: Bool { layer?.hasEvicted ?? false }
    var isDecoding: Bool { decoder != nil }

    /// Slots of each head without memory pressure, once known.
    var fullBudgets: [Int]? {
        pressure.full?.left(settings.filling.count).budgets
    }

    /// The mean of a head's slots without memory pressure, once known: of a conversation that begins.
    var meanSlots: Int? {
        pressure.full.map { $0.budgets.reduce(0, +) / $0.budgets.count }
    }

    /// How many of the newest tokens can be taken back.
    var undoableSteps: Int { layer.map { journal.undoable(of: $0) } ?? 0 }

    /// Every array held; of what kernels change in place their last outputs stand for it.
    var heldArrays: [MLXArray] {
        guard let layer else {
            return (given.frame.map { FrameArrays($0).arrays } ?? []) + journal.arrays
        }
        return decoder == nil
            ? layer.namedArrays.map(\.array) + journal.arrays : layer.decodedState
    }

    /// Bytes of everything held.
    var nbytes: Int {
        if let decoder { return decoder.nbytes + layer!.unlentBytes }
        // What a step left as it was is one array, in the layer and in the journal.
        var counted: Set<ObjectIdentifier> = []
        return heldArrays.reduce(0) {
            $0 + (counted.insert(ObjectIdentifier($1)).inserted ? $1.nbytes : 0)
        }
    }
}
