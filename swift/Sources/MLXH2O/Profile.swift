import Foundation
import MLX

/// What tells models apart without reading their weights.
public struct ModelIdentity: Sendable, Equatable {
    /// As in the model's config.
    public let modelType: String
    /// KV heads of each bounded layer.
    public let kvHeads: [Int]
    /// D of each bounded layer.
    public let keyWidths: [Int]
    /// Rows of the embedding, 0 if unknown.
    public let vocabularySize: Int
    /// A few entries of the embedding.
    public let probe: [Double]

    // Two models are taken for the same when their probes point the same way: quantizing a model
    // moves it by a percent or two, another training run turns it anywhere.
    private static let leastLikeness = 0.9

    /// Why the other is another model, or nil if it is not.
    public func difference(from other: ModelIdentity) -> String? {
        if modelType != other.modelType { return "its type is \(other.modelType)" }
        if kvHeads != other.kvHeads { return "its KV heads are \(other.kvHeads)" }
        if keyWidths != other.keyWidths { return "its key widths are \(other.keyWidths)" }
        if vocabularySize != other.vocabularySize {
            return "its vocabulary has \(other.vocabularySize) tokens"
        }
        func length(_ probe: [Double]) -> Double { probe.reduce(0) { $0 + $1 * $1 }.squareRoot() }
        let product = zip(probe, other.probe).reduce(0) { $0 + $1.0 * $1.1 }
        let likeness = product / max(length(probe) * length(other.probe), 1e-12)
        let differs = probe.count != other.probe.count || !(likeness >= Self.leastLikeness)
        return !probe.isEmpty && differs ? "its embedding differs" : nil
    }
}

/// A model that profiles can be told apart by.
public protocol ProfiledModel {
    /// As in the model's config.
    var modelType: String { get }
    /// Rows of the embedding.
    var vocabularySize: Int { get }
    /// Embeddings `[L, width]` of tokens `[L]`.
    func embedded(_ tokens: MLXArray) -> MLXArray
}

/// What each KV head of a model loses at each number of slots, and so how many slots it deserves.
///
/// Heads differ more than policies do: a few copy and recall over long distances, most look at the
/// last tokens. `mlx_h2o calibrate` writes profiles; the files are the same here.
public struct H2OProfile: Sendable, Equatable {
    /// The file name under which a profile lies beside a model's weights.
    public static let fileName = "mlx_h2o_profile.json"
    /// Below 4 sinks, a few recent tokens and some to choose from, a head is no use.
    public static let smallestBudget = 12

    /// The model it belongs to.
    public let model: ModelIdentity
    /// Numbers of slots, ascending.
    public let grid: [Int]
    /// Per bounded layer and KV head the loss at each grid point, at least 0.
    public let losses: [[[Double]]]
    /// How the losses were measured.
    public let method: String

    /// Read a profile.
    ///
    /// - Throws: ``H2OError/profile(_:)``: the file is no profile, or one of another version.
    public init(contentsOf url: URL) throws {
        let json: SettingValue
        do {
            json = try SettingValue(parsing: String(contentsOf: url, encoding: .utf8))
        } catch {
            throw H2OError.profile("Cannot read the profile \(url.path): \(error)")
        }
        try self.init(json)
    }

    /// A profile from its JSON.
    init(_ json: SettingValue) throws {
        guard json["format"]?.string == "mlx-h2o profile" else {
            throw H2OError.profile("This is no mlx-h2o profile.")
        }
        // Version 2 says more beside the curves.
        guard let version = json["version"]?.int, (1...2).contains(version) else {
            throw H2OError.profile(
                "This profile has version \(json["version"]?.text ?? "unknown"); this reads 1, 2.")
        }
        func integers(_ value: SettingValue?) -> [Int]? {
            value?.array.flatMap { whole($0.map(\.int)) }
        }
        func numbers(_ value: SettingValue?) -> [Double]? {
            value?.array.flatMap { whole($0.map(\.double)) }
        }
        guard let model = json["model"], let type = model["model_type"]?.string,
            let heads = integers(model["kv_heads"]), let widths = integers(model["key_widths"]),
            let vocabulary = model["vocab_size"]?.int, let probe = numbers(model["probe"]),
            let grid = integers(json["grid"]), let method = json["method"]?.string,
            let losses = json["losses"]?.array.flatMap({ layers in
                whole(layers.map { $0.array.flatMap { whole($0.map(numbers)) } })
            })
        else {
            throw H2OError.profile("The profile is damaged.")
        }
        let ascends = zip(grid, grid.dropFirst()).allSatisfy { $0 < $1 }
        let curves = losses.flatMap { $0 }
        guard let first = grid.first, first >= 1, ascends, losses.map(\.count) == heads,
            curves.allSatisfy({ $0.count == grid.count && $0.allSatisfy { $0 >= 0 && $0.isFinite } }
            )
        else {
            throw H2OError.profile(
                "A profile's grid must ascend from at least 1, and every head needs one finite loss "
                    + "of at least 0 per grid point.")
        }
        self.model = ModelIdentity(
            modelType: type, kvHeads: heads, keyWidths: widths, vocabularySize: vocabulary,
            probe: probe)
        (self.grid, self.losses, self.method) = (grid, losses, method)
    }

    /// Slots per layer and KV head, `mean` on average, exactly.
    ///
    /// Greedy: every head starts at the least; the largest saving of loss per slot, over all steps
    /// up the grid, is bought next, until the slots are spent.
    ///
    /// - Throws: ``H2OError/profile(_:)``: `mean` is below `least`.
    public func budgets(mean: Int, least: Int = H2OProfile.smallestBudget) throws -> [[Int]] {
        guard mean >= least else {
            throw H2OError.profile(
                "A budget of \(mean) slots a head is below the \(least) that a head needs with this "
                    + "policy; raise the budget or lower sink and recent.")
        }
        let curves = losses.flatMap { $0 }
        var slots = Array(repeating: least, count: curves.count)
        var left = (mean - least) * curves.count
        var offers = curves.map { bestStep($0, have: least) }
        while left > 0 {
            var head = 0
            for other in curves.indices.dropFirst()
            where (offers[other].saving, -slots[other]) > (offers[head].saving, -slots[head]) {
                head = other
            }
            guard offers[head].saving > 0 else {
                // Nothing more to gain: the rest is spread evenly.
                let (each, rest) = left.quotientAndRemainder(dividingBy: curves.count)
                for i in slots.indices { slots[i] += each + (i < rest ? 1 : 0) }
                break
            }
            let bought = min(offers[head].target - slots[head], left)
            slots[head] += bought
            left -= bought
            offers[head] = bestStep(curves[head], have: slots[head])
        }
        var heads = slots.makeIterator()
        return losses.map { $0.map { _ in heads.next()! } }
    }

    /// The best saving per slot from `have` slots on, and where it leads.
    private func bestStep(_ curve: [Double], have: Int) -> (saving: Double, target: Int) {
        let now = loss(curve, at: have)
        var best: (saving: Double, target: Int)?
        for (slots, loss) in zip(grid, curve) where slots > have {
            let saving = (now - loss) / Double(slots - have)
            if best.map({ saving > $0.saving }) ?? true { best = (saving, slots) }
        }
        return best ?? (0, have)
    }

    /// The loss at any number of slots, linear between grid points.
    private func loss(_ curve: [Double], at slots: Int) -> Double {
        if slots <= grid[0] { return curve[0] }
        for i in 1 ..< grid.count where slots <= grid[i] {
            let part = Double(slots - grid[i - 1]) / Double(grid[i] - grid[i - 1])
            return curve[i - 1] + part * (curve[i] - curve[i - 1])
        }
        return curve.last!
    }

    /// Throw ``H2OError/profile(_:)`` unless the profile belongs to the model.
    public func require(_ other: ModelIdentity) throws {
        if let reason = model.difference(from: other) {
            throw H2OError.profile(
                "This profile was made for another model (\(model.modelType)): \(reason). Make one "
                    + "with `mlx_h2o calibrate --model ...`, or use uniform budgets.")
        }
    }
}

/// All elements, or nil if one of them is.
private func whole<Element>(_ elements: [Element?]) -> [Element]? {
    let found = elements.compactMap { $0 }
    return found.count == elements.count ? found : nil
}
