import MLX

/// A layer's memory at rest: where its rows lie, the newest of them apart, what stays of the evicted,
/// and which slots go next. Nothing changes any of it but the methods in this file.
///
/// A step calls ``takeIn(keys:values:noting:)``, then attends (Observe.swift), then ``settle(_:)``.
/// For fused steps the rows are lent to a ``GPUDecoder``: until they are taken back the layer knows
/// only how many there are.
struct Layer {
    private(set) var settings: CacheSettings
    private(set) var rowTypes: RowTypes
    /// The next logical position.
    private(set) var offset = 0
    /// The position from which scores speak (``newTurn(carry:)``).
    private(set) var agedFrom = 0
    private(set) var store: SlotStore
    /// The newest tokens, where they are stored in another width; all others are in slots.
    private(set) var window: RecentWindow?
    private(set) var remainder: Remainder
    /// Slots to overwrite next, `[B, H, evictEvery]`; each run knows how many it has used.
    private(set) var victims: MLXArray?
    /// In which keys and queries come in, if in any.
    let frame: FrameArrays?
    /// Where each head's remainder saturates, `[H]` float32.
    let saturation: MLXArray

    /// A layer without tokens.
    ///
    /// - Parameters:
    ///   - settings: What it is to be.
    ///   - rowTypes: What its rows have in common.
    ///   - plan: Slots of each head.
    ///   - reserved: How many more each head has, for plain rows.
    /// - Throws: ``H2OError/configuration(_:)`` for budgets without room for a recent window.
    init(
        _ settings: CacheSettings, _ rowTypes: RowTypes, _ plan: SlotPlan, reserved: Int
    ) throws {
        let budgets = plan.budgets, size = try settings.recentWindow(budgets)
        self.settings = settings.with(
            SlotPlan(budgets: budgets.map { $0 + reserved }, later: plan.later))
        self.rowTypes = rowTypes
        (frame, saturation) = settings.arrays(heads: rowTypes.heads)
        store = SlotStore(budgets: budgets.map { $0 - (size ?? 0) }, reserved: reserved)
        remainder = Remainder(
            batch: rowTypes.batch, heads: rowTypes.heads, keyWidth: rowTypes.keyWidth,
            valueWidth: rowTypes.valueWidth)
        guard let size else { return }
        window = RecentWindow(
            size: size, kept: settings.packing, policy: settings.policy)
        // So that there are fields to look at while all tokens are recent.
        makeRoom()
    }

    /// A layer as it was saved.
    init(_ settings: CacheSettings, _ saved: SavedState) {
        (self.settings, rowTypes) = (settings, saved.rowTypes)
        (frame, saturation) = settings.arrays(heads: saved.rowTypes.heads)
        (offset, store, window) = (saved.offset, saved.store, saved.window)
        agedFrom = saved.agedFrom
        (remainder, victims) = (saved.remainder, saved.victims)
        chooseVictims()
    }

    /// Tokens in the recent window.
    var recentlyHeld: Int { window?.length ?? 0 }

    /// Tokens that each head of a run may hold, the newest included.
    func budget(of run: Run) -> Int { run.budget + (window?.size ?? 0) }

    /// Tokens that each head of a run has lost.
    func evicted(_ run: Run) -> Int { offset - run.length - recentlyHeld }

    // MARK: a step

    /// Take new rows in: one of each head, or a chunk.
    ///
    /// - Parameters:
    ///   - keys: `[B, H, L, D]`.
    ///   - values: `[B, H, L, Dv]`.
    ///   - before: Where it is to be noted what one row changes.
    /// - Returns: Rows of a chunk that goes over budget, `[B, H, L, ...]` by name: they are attended
    ///   to, and ``settle(_:)`` stores those that stay.
    mutating func takeIn(
        keys: MLXArray, values: MLXArray, noting before: inout StepBefore?
    ) -> Fields? {
        store.fitPositions(offset + keys.dim(2))
        let rows =
            window == nil
            ? rows(keys, values)
            : window!.push(keys: keys, values: values, offset: offset, after: before?.window)
        offset += keys.dim(2)
        guard let rows = rows.map(marked) else { return nil }
        if keys.dim(2) == 1 {
            write(rows, noting: &before)
            return nil
        }
        let count = rows["positions"]!.dim(2)
        guard store.runs.allSatisfy({ $0.length + count <= $0.budget }) else { return rows }
        store.append(rows)
        return nil
    }

    /// Store one row per head: into the next unused slot, or over a victim, which is folded.
    private mutating func write(_ row: Fields, noting before: inout StepBefore?) {
        store.reserve(1, like: row)
        let next = nextSlots()
        var index = flatIndex(next.map(\.places))
        if next.contains(where: \.isVictim) {
            // What is folded, and what it takes to undo that; scores are noted before, all of them.
            let asides: Set<String> =
                before == nil ? ["scores", "positions", "value_lengths"] : ["scores"]
            let old = store.take(index, row.keys.filter { !asides.contains($0) })
            if before != nil {
                let places = joined(next.map { $0.places.squeezed(axis: -1) }, axis: 1)
                before!.overwritten = (places, old)
                if settings.remembers { before!.remainder = remainder }
                // Read before written: a row still to be read would make the write copy everything.
                index = depends(input: index, dependencies: Array(old.values))
            }
            if settings.remembers {
                remainder = folded(old, next.map(\.isVictim))
                index = depends(input: index, dependencies: remainder.arrays)
            }
        }
        store.put(index, row.mapValues { $0.squeezed(axis: 2) })
    }

    /// Use up each head's next slot: per run `[B, heads, 1]`, and whether a victim is in it.
    private mutating func nextSlots() -> [(places: MLXArray, isVictim: Bool)] {
        store.runs.enumerated().map { i, run in
            guard let next = store.useNext(i, named: settings.policy.options.evictEvery) else {
                let unused = MLXArray(Int32(run.length))
                return (broadcast(unused, to: [rowTypes.batch, run.heads, 1]), false)
            }
            let own = victims!.sliced(run.range, axis: 1)
            return (own.sliced(next ..< next + 1, axis: 2), true)
        }
    }

    /// Flat indices `[B, H]` of one slot of every head, per run `[B, heads, 1]`.
    private func flatIndex(_ places: [MLXArray]) -> MLXArray {
        let index = zip(store.runs, places).map { store.flatIndex($0, $1).squeezed(axis: -1) }
        return joined(index, axis: 1)
    }

    /// After attention: write scores back or reduce a chunk, then choose the next victims.
    ///
    /// - Parameter seen: All slots attended to, with their scores brought up to date.
    mutating func settle(_ seen: [AttendedSlots]) {
        let newestScores = seen.compactMap(\.newestScores)
        if !newestScores.isEmpty { window!.writeScores(joined(newestScores, axis: 1)) }
        if seen.contains(where: { $0.count > $0.run.length || $0.count > $0.run.budget }) {
            let kept = seen.map { reduced($0) }
            store.replace(kept)
            forgetVictims()
        } else if settings.policy.needsAttention {
            store.write("scores", seen.map { $0.fields["scores"]! })
        }
        chooseVictims()
    }

    /// The rows of a run that stay within its budget; the others are folded.
    private mutating func reduced(_ attended: AttendedSlots) -> Fields {
        if attended.count <= attended.run.budget { return attended.fields }
        let kept = keptSlots(of: attended)
        if settings.remembers { remainder = folded(attended, but: kept) }
        return attended.rows(at: kept)
    }

    /// For every full run without victims left, choose the next `evictEvery`.
    private mutating func chooseVictims() {
        if let window, window.length < window.size { return }  // the next token pushes none out
        guard store.runs.contains(where: \.needsVictims) else { return }
        let count = settings.policy.options.evictEvery
        let chosen = store.runs.enumerated().map { i, run in
            if run.needsVictims {
                defer { store.nameVictims(i, count) }
                return nextVictims(of: run)
            }
            return victims?.sliced(run.range, axis: 1)
                ?? MLXArray.zeros([rowTypes.batch, run.heads, count], dtype: .int32)
        }
        victims = joined(chosen, axis: 1)
    }

    /// Have every full run choose anew.
    private mutating func forgetVictims() {
        victims = nil
        store.forgetVictims()
    }

    // MARK: between steps

    /// Have keys and values in the model's dtypes, where they were saved in others.
    mutating func cast(to types: RowTypes) {
        store.cast(keys: types.keyDType, values: types.valueDType, settings.packing)
        window?.cast(keys: types.keyDType, values: types.valueDType)
        rowTypes = types
    }

    /// Write plain rows into the reserved slots of the first run.
    mutating func writeReserved(_ rows: Fields) {
        let run = store.runs[0]
        let own = broadcast(positions(-store.reserved ..< 0), to: [run.heads, store.reserved])
        store.put(store.flatIndex(run, own).reshaped([1, -1]), rows)
    }

    /// What the next step changes, as far as it is known before.
    var before: StepBefore {
        StepBefore(
            offset: offset, runs: store.runs, victims: victims, scores: store.fields["scores"],
            window: window?.before())
    }

    /// Take steps back, newest first.
    mutating func putBack(_ steps: [StepBefore]) {
        guard let first = steps.last else { return }
        for step in steps {
            if let (places, rows) = step.overwritten {
                let perRun = store.runs.map { places.sliced($0.range, axis: 1).column }
                store.put(flatIndex(perRun), rows)
            }
            if let before = step.remainder { remainder = before }
            if let before = step.window { window!.putBack(before) }
        }
        offset = first.offset
        store.putBack(first.runs)
        if let scores = first.scores {
            let before = SlotStore(
                runs: first.runs, reserved: store.reserved, fields: ["scores": scores])
            store.write("scores", first.runs.map { before.view($0, "scores") })
        }
        victims = first.victims
        store.fitPositions(offset)
    }

    /// Forget the newest n tokens, where none was evicted.
    mutating func dropNewest(_ n: Int) {
        guard n > 0 else { return }
        offset -= n
        agedFrom = min(agedFrom, max(offset - 1, 0))
        store.shorten(by: n - (window?.trim(n) ?? 0))
        store.fitPositions(offset)
        forgetVictims()
    }

    // MARK: lent to kernels

    /// Whether the next token needs more memory than there is, or a position more bits.
    var isOutOfRoom: Bool {
        store.runs.contains { $0.length == $0.allocated && $0.length < $0.budget }
            || !store.positionsFit(offset + 1)
    }

    /// Have memory for one more token.
    mutating func makeRoom() {
        let row = rowTypes.zeros
        store.fitPositions(offset + 1)
        store.reserve(1, like: rows(row.keys, row.values))
    }

    /// Lend the rows: `[B, S, ...]` by name.
    mutating func lend() -> Fields {
        if victims == nil {
            let count = settings.policy.options.evictEvery
            victims = MLXArray.zeros([rowTypes.batch, rowTypes.heads, count], dtype: .int32)
        }
        return store.lend()
    }

    /// Have the rows that were lent again.
    mutating func takeBack(_ fields: Fields) { store.getBack(fields) }

    /// One token in one fused step; what each head does in it is planned here.
    ///
    /// - Returns: `[B, Hq, 1, Dv]`.
    mutating func step(_ tokens: NewTokens, through decoder: GPUDecoder) -> MLXArray {
        offset += 1
        let heads = store.runs.indices.flatMap { i in
            let victim = store.useNext(i, named: settings.policy.options.evictEvery)
            let run = store.runs[i]
            if run.needsVictims { store.nameVictims(i, settings.policy.options.evictEvery) }
            return headPlans(run, victim)
        }
        let result = decoder.step(
            tokens, offset: offset, heads: heads, remainder: remainder, victims: victims!,
            agedFrom: agedFrom)
        (remainder, victims) = (result.remainder, result.victims)
        return result.output
    }
}

// MARK: other budgets

extension Layer {
    /// Slots of each head, and those that follow.
    var plan: SlotPlan { SlotPlan(budgets: budgets, later: settings.filling) }

    /// Change the slots of each head; what no longer fits is folded.
    ///
    /// - Throws: ``H2OError/configuration(_:)`` for budgets without room for the recent window;
    ///   nothing is changed then.
    mutating func resize(_ plan: SlotPlan) throws {
        let size = try settings.recentWindow(plan.budgets), first = offset - recentlyHeld
        settings = settings.with(plan)
        var overflow: Fields?
        if let size, var gone = window!.resize(size) {
            let shape = Array(gone["keys"]!.shape[0 ..< 3])
            gone["positions"] = broadcast(positions(first ..< first + shape[2]), to: shape)
            overflow = marked(gone)
        }
        let own = plan.budgets.map { $0 - (size ?? 0) }
        store.regroup(own)
        forgetVictims()
        settle(attended(overflow))
        // Heads that have become alike form one run again.
        store.regroup(own)
        forgetVictims()
        chooseVictims()
    }
}

// MARK: pins and turns

extension Layer {
    /// Whether the next token brings a pinned one into the slots.
    var nextIsPinned: Bool {
        let next = offset - (window?.size ?? 0)
        return settings.pins.contains { $0.contains(next) }
    }

    /// Rows with the positions that slots store, which tell of pins.
    private func marked(_ rows: Fields) -> Fields {
        guard !settings.pins.isEmpty else { return rows }
        return rows.merging(["positions": PinnedPositions.stored(rows["positions"]!, settings.pins)]
        ) { $1 }
    }

    /// Pin what these settings, otherwise its own, pin, and nothing else.
    mutating func hold(pinsOf settings: CacheSettings) {
        self.settings = settings
        if !store.fields.isEmpty {
            let held = store.runs.map { store.view($0, "positions") }
            store.write("positions", held.map { PinnedPositions.stored($0, settings.pins) })
        }
        forgetVictims()
        chooseVictims()
    }

    /// Begin a turn, of which `carry` of the past counts, from 0 to 1.
    mutating func newTurn(carry: Double) {
        guard carry < 1, offset > 0 else { return }
        let before = agedFrom, after = offset - Int(carry * Double(offset - before))
        // Some step is always spoken of, or masses per step would be none.
        agedFrom = min(after, offset - 1)
        guard settings.policy.needsAttention else { return }
        let policy = settings.policy, now = MLXArray(Int32(offset))
        func carried(_ fields: Fields) -> MLXArray {
            let places = PinnedPositions.unmarked(fields["positions"]!)
            let ages = [before, after].map { (now - maximum(places, Int32($0))).float32 }
            return policy.carried(
                fields["scores"]!, ages: ages[0], agesAfter: ages[1], carry: carry)
        }
        store.write("scores", store.runs.map { carried(store.views($0)) })
        if let window, window.length > 0 {
            self.window!.writeScores(carried(window.views(0 ..< store.heads, offset: offset)))
        }
    }
}
