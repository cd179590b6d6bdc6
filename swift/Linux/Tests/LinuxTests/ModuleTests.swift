import MLX
import MLXNN
import Testing

private class Inner: Module {
    @ModuleInfo(key: "q_proj") var q: Linear
    let norm = RMSNorm(dimensions: 4)
    let _hidden = MLXArray(0)

    override init() {
        super.init()
        _q.wrappedValue = Linear(4, 4, bias: false)
    }
}

private class Outer: Module {
    let layers = [Inner(), Inner()]
    @ParameterInfo(key: "scale") var factor = MLXArray(1 as Float)
    @ModuleInfo(key: "head") var head: Linear?
    @ModuleInfo var tail = Linear(2, 2)
}

@Suite struct ModuleTests {
    @Test func parametersHaveTheWeightsNames() {
        let names = Outer().parameters().flattened().map(\.0)
        #expect(
            Set(names) == [
                "layers.0.q_proj.weight", "layers.0.norm.weight", "layers.1.q_proj.weight",
                "layers.1.norm.weight", "scale", "tail.weight", "tail.bias",
            ])
        #expect(names.count == 7)
        let modules = Outer().namedModules().map(\.0)
        #expect(modules.contains("layers.1.q_proj") && modules.contains(""))
    }

    @Test func updates() throws {
        let module = Outer()
        let weights = module.parameters().flattened().map { ($0.0, $0.1 * 0 + 3) }
        try module.update(parameters: ModuleParameters.unflattened(weights), verify: .all)
        for (name, array) in module.parameters().flattened() {
            #expect((array .== 3).all().item(Bool.self), "\(name)")
        }
        #expect(module.layers[1].q.weight.dim(0) == 4)
    }

    @Test func refusesWhatDoesNotFit() {
        let module = Outer()
        func update(_ change: (inout [String: MLXArray]) -> Void) throws {
            var weights = Dictionary(uniqueKeysWithValues: module.parameters().flattened())
            change(&weights)
            try module.update(parameters: ModuleParameters.unflattened(weights), verify: .all)
        }
        #expect(throws: Never.self) { try update { _ in } }
        #expect(throws: UpdateError.self) { try update { $0["extra"] = MLXArray(1) } }
        #expect(throws: UpdateError.self) { try update { $0["scale"] = nil } }
        #expect(throws: UpdateError.self) { try update { $0["scale"] = MLXArray([1, 2]) } }
    }

    @Test func childrenCanBeReplaced() throws {
        let module = Outer()
        let twin = Linear(weight: MLXArray.zeros([4, 4]))
        try module.update(
            modules: ModuleChildren.unflattened([("layers.1.q_proj", twin)]), verify: .none)
        #expect(module.layers[1].q === twin && module.layers[0].q !== twin)
        #expect(throws: UpdateError.self) {
            try module.update(
                modules: ModuleChildren.unflattened([("layers.0.norm", twin)]), verify: .none)
        }
    }

    @Test func layers() {
        let x = MLXRandom.normal([2, 3], key: MLXRandom.key(0))
        let linear = Linear(3, 5)
        let expected = matmul(x, linear.weight.T) + linear.bias!
        #expect(allClose(linear(x), expected, atol: 1e-6).item(Bool.self))
        let embedding = Embedding(embeddingCount: 7, dimensions: 3)
        #expect(arrayEqual(embedding(MLXArray([4]))[0], embedding.weight[4]).item(Bool.self))
        #expect(embedding.asLinear(x).shape == [2, 7])
        #expect(abs(silu(MLXArray(2 as Float)).item(Float.self) - 1.7615942) < 1e-6)
    }
}
