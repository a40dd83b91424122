def probe_encode(values):
    return {"x0": values["x0"]}
